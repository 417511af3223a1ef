#include "executor/checkpoint/run_checkpoints.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <span>
#include <thread>

#include "core/error.h"
#include "core/files.h"
#include "core/printable.h"
#include "executor/checkpoint/manifest.h"
#include "executor/checkpoint/state.h"

namespace shardwright {
namespace {

RankState StateOf(const Runtime& runtime, Rank rank) {
  const Binding& binding = runtime.BindingOf(rank);
  return {runtime.InputOf(rank).model, binding.units, binding.model_buffers,
          [&runtime, rank](void* to, const void* from, std::int64_t bytes) {
            runtime.CopyMemory(rank, to, from, bytes);
          },
          runtime.PartOf(rank)};
}

constexpr int kAttempts = 3;
constexpr std::chrono::milliseconds kPause{500};  // after the first; longer after each

std::vector<std::byte> BytesOf(const std::string& text) {
  const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

std::string TextOf(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// As a manifest, since names may hold whatever JSON does.
std::vector<std::byte> KeysOf(const std::vector<StretchData>& stretches) {
  Manifest manifest;
  SavedFile& file = manifest.files.emplace_back();
  file.name = "keys";
  for (const StretchData& data : stretches) {
    file.stretches.push_back(data.stretch);
  }
  return BytesOf(ManifestJson(manifest));
}

std::set<std::pair<std::string, std::int64_t>> ReadKeys(const std::vector<std::byte>& bytes) {
  std::set<std::pair<std::string, std::int64_t>> keys;
  for (const SavedFile& file : ParseManifest(TextOf(bytes), "another rank's keys").files) {
    for (const SavedStretch& stretch : file.stretches) {
      keys.emplace(stretch.tensor, stretch.begin);
    }
  }
  return keys;
}

// `to` is in memory of `copy`, `from` in any.
void CopyUnits(std::span<const BoundUnit> from, std::span<const BoundUnit> to,
               const MemoryCopy& copy) {
  SW_CHECK(from.size() == to.size(), "two runtimes of one plan");
  for (std::size_t u = 0; u < from.size(); ++u) {
    const BoundUnit& unit = from[u];
    if (unit.parameters == nullptr) {
      continue;
    }
    // A forward-only program has what the training program keeps beside its masters.
    const bool is_copy = to[u].pieces != unit.pieces || to[u].dtype != unit.dtype;
    SW_CHECK(!is_copy || (unit.copy.has_value() && unit.copy->pieces == to[u].pieces &&
                          unit.copy->dtype == to[u].dtype),
             "units of one plan");
    copy(to[u].parameters, is_copy ? unit.copy->data : unit.parameters,
         to[u].elements * SizeOf(to[u].dtype));
  }
}

bool HasStatesOnHost(const Program& program) {
  return std::any_of(program.buffers.begin(), program.buffers.end(), [](const Buffer& buffer) {
    return buffer.on_host && buffer.category == Category::kOptimizerState;
  });
}

}  // namespace

Wait WaitForFiles(const Model& model, const Job& job, const std::string& what) {
  Manifest manifest;
  DescribeState(model, job, manifest);
  std::int64_t bytes = 0;
  for (const SavedTensor& tensor : manifest.tensors) {
    bytes += tensor.Elements() * SizeOf(tensor.dtype);
  }
  constexpr std::int64_t kBytesPerSecond = 32 << 20;
  return {what, std::chrono::seconds(bytes / kBytesPerSecond)};
}

RunCheckpoints::RunCheckpoints(std::string folder, const RunFolder* own, std::int64_t keep,
                               RunIdentity identity, const Model& model, const Job& job,
                               const Program& program, const Sampler& sampler,
                               MessagePassing* processes)
    : folder_(std::move(folder)),
      own_(own),
      keep_(keep),
      identity_(std::move(identity)),
      model_(model),
      job_(job),
      program_(program),
      sampler_(sampler),
      processes_(processes) {
  if (processes_ != nullptr) {
    channel_ = processes_->Split(0);
  }
  // Nobody writes before process 0 has made a folder to write into.
  if (processes_ == nullptr || processes_->rank() == 0) {
    RemoveUnfinishedCheckpoints(folder_);
  }
}

// Replicas hold the same stretches: the first rank that has one saves it.
std::vector<RunCheckpoints::Share> RunCheckpoints::TakeShares(const Runtime& runtime) {
  std::vector<Share> shares;
  std::set<StretchKey> taken;
  for (const Rank r : runtime.LocalRanks()) {
    const RankState state = StateOf(runtime, r);
    std::vector<StretchData> all = StretchesOf(job_.optimizer.kind, state);
    if (processes_ != nullptr && !of_lower_ranks_) {
      of_lower_ranks_.emplace();
      const auto keys = ShareBytes(*processes_, channel_, {Name()}, KeysOf(all));
      for (std::size_t lower = 0; lower < r.value; ++lower) {
        of_lower_ranks_->merge(ReadKeys(keys[lower]));
      }
    }
    std::erase_if(all, [&](const StretchData& data) {
      const StretchKey key(data.stretch.tensor, data.stretch.begin);
      return (of_lower_ranks_ && of_lower_ranks_->contains(key)) || !taken.insert(key).second;
    });
    shares.push_back({static_cast<std::int64_t>(r.value), {std::move(all), state.copy}});
  }
  return shares;
}

Manifest RunCheckpoints::Describe(const Runtime& runtime) const {
  Manifest manifest;
  DescribeState(model_, job_, manifest);
  manifest.run = identity_.id;
  manifest.settings = identity_.settings;
  manifest.dialect = program_.dialect;
  manifest.shard_size = program_.shard_size;
  manifest.replicate_size = program_.replicate_size;
  manifest.step = runtime.next_step();
  manifest.update = runtime.next_step() - runtime.skipped_steps();
  manifest.loss_scaler = runtime.loss_scaler();
  manifest.sampler = sampler_;
  return manifest;
}

void RunCheckpoints::Save(const Runtime& runtime) {
  Finish();  // one snapshot in memory at a time
  step_ = runtime.next_step();
  auto shares = std::make_shared<std::vector<Share>>(TakeShares(runtime));
  const bool in_place = HasStatesOnHost(program_);
  for (Share& share : *shares) {
    if (!in_place) {
      TakeSnapshot(share.state);
    }
  }
  is_writing_ = true;
  background_.Start(
      [this, shares, manifest = Describe(runtime)] { WriteRepeatedly(*shares, manifest); });
  if (in_place) {
    Finish();
  }
}

void RunCheckpoints::Finish() {
  if (!is_writing_) {
    return;
  }
  is_writing_ = false;
  try {
    AllOrNone(processes_, channel_, WaitForFiles(model_, job_, Name()),
              [this] { background_.Wait(); });
    newest_ = CheckpointFolder(folder_, step_);
    has_saved_last_ = true;
  } catch (const EnvironmentError& error) {
    has_saved_last_ = false;
    failed_.push_back({step_, error.what()});
    if (processes_ == nullptr || processes_->rank() == 0) {
      Say("warning: no " + Name() + ", after " + std::to_string(kAttempts) +
          " attempts: " + error.what());
    }
  }
}

bool RunCheckpoints::IsFinite(const Runtime& runtime) {
  Finish();  // the background uses the channel, too
  std::vector<std::byte> mine(1, std::byte{1});
  for (const Rank r : runtime.LocalRanks()) {
    const RankState state = StateOf(runtime, r);
    const RankShare all = {StretchesOf(job_.optimizer.kind, state), state.copy};
    mine[0] &= shardwright::IsFinite(all) ? std::byte{1} : std::byte{0};
  }
  if (processes_ == nullptr) {
    return mine[0] == std::byte{1};
  }
  const auto all = ShareBytes(*processes_, channel_, {"numbers of the checkpoint"}, mine);
  return std::all_of(all.begin(), all.end(),
                     [](const auto& of_rank) { return of_rank.front() == std::byte{1}; });
}

void RunCheckpoints::WriteRepeatedly(const std::vector<Share>& shares,
                                     const Manifest& manifest) const {
  for (int attempt = 1;; ++attempt) {
    try {
      AllOrNone(processes_, channel_, WaitForFiles(model_, job_, Name()), [&] {
        if (processes_ == nullptr) {
          Write(shares, manifest);
        } else {
          WriteTogether(shares.front(), manifest);
        }
      });
      return;
    } catch (const EnvironmentError&) {
      if (attempt == kAttempts) {
        throw;
      }
      std::this_thread::sleep_for(attempt * kPause);
    }
  }
}

void RunCheckpoints::Write(const std::vector<Share>& shares, const Manifest& manifest) const {
  own_->CheckPlace();
  CheckpointWriter writer(folder_, manifest.step);
  for (const Share& share : shares) {
    if (!share.state.stretches.empty()) {
      writer.WriteRank(share.rank, share.state);
    }
  }
  Commit(writer, manifest);
}

void RunCheckpoints::Commit(CheckpointWriter& writer, const Manifest& manifest) const {
  writer.Commit(manifest);
  own_->CheckPlace();
  RemoveOldCheckpoints(folder_, keep_, identity_.id, manifest.step);
}

// Process 0 makes the folder and says which; all write their files and tell it what they wrote;
// then it writes the manifest. Who cannot do its part throws; the others leave it at that.
void RunCheckpoints::WriteTogether(const Share& mine, const Manifest& manifest) const {
  std::unique_ptr<CheckpointWriter> writer;
  std::exception_ptr problem;
  std::int64_t maker = 0;  // the writer that made the folder; 0: there is none
  if (processes_->rank() == 0) {
    try {
      own_->CheckPlace();
      writer = std::make_unique<CheckpointWriter>(folder_, manifest.step);
      maker = writer->number();
    } catch (const EnvironmentError&) {
      problem = std::current_exception();
    }
  }
  ShareFromFirst(*processes_, channel_, {Name()}, &maker, sizeof maker);
  std::vector<std::byte> written;  // a manifest of this process's file; empty: it failed
  if (maker != 0) {
    try {
      Manifest its;
      if (!mine.state.stretches.empty()) {
        its.files.push_back(
            WriteRankFile(UnfinishedFolder(folder_, manifest.step, maker), mine.rank, mine.state));
      }
      written = BytesOf(ManifestJson(its));
    } catch (const EnvironmentError&) {
      problem = std::current_exception();
    }
  }
  const auto all =
      CollectBytes(*processes_, channel_, WaitForFiles(model_, job_, Name()), std::move(written));
  if (problem) {
    std::rethrow_exception(problem);
  }
  const bool is_whole =
      std::none_of(all.begin(), all.end(), [](const auto& part) { return part.empty(); });
  if (!writer || !is_whole) {
    return;
  }
  for (const std::vector<std::byte>& part : all) {
    for (SavedFile& file : ParseManifest(TextOf(part), folder_).files) {
      writer->Add(std::move(file));
    }
  }
  Commit(*writer, manifest);
}

namespace {

// The newest good one of the finished checkpoints before `checkpoint`; empty: none.
std::string GoodBefore(const std::string& checkpoint) {
  const std::filesystem::path path(checkpoint);
  std::vector<std::string> older = FinishedCheckpoints(path.parent_path().string());
  while (!older.empty()) {
    const bool is_this = std::filesystem::path(older.back()).filename() == path.filename();
    older.pop_back();
    if (is_this) {
      break;
    }
  }
  for (auto other = older.rbegin(); other != older.rend(); ++other) {
    try {
      Checkpoint(*other).Verify();
      return *other;
    } catch (const InputError&) {
      continue;
    }
  }
  return {};
}

}  // namespace

void OpenOrOfferOlder(const std::string& checkpoint, const std::string& how,
                      const std::function<void()>& open) {
  try {
    open();
  } catch (const InputError& error) {
    const std::string good = GoodBefore(checkpoint);
    if (good.empty()) {
      throw;
    }
    std::string text = how;
    if (const std::size_t at = text.find("%STEP"); at != std::string::npos) {
      text.replace(at, 5, std::to_string(Checkpoint(good).manifest().step));
    }
    throw InputError(std::string(error.what()) + "; the newest good one is " + good + text);
  }
}

void SetLaterAside(const std::string& folder, std::int64_t step) {
  const std::string from = CheckpointFolder(folder, step);
  std::vector<std::string> finished = FinishedCheckpoints(folder);
  while (!finished.empty() && finished.back() != from) {
    std::string aside = finished.back() + "-set-aside";
    for (int k = 2; Exists(aside); ++k) {
      aside = finished.back() + "-set-aside-" + std::to_string(k);
    }
    std::error_code error;
    std::filesystem::rename(finished.back(), aside, error);
    if (error) {
      throw EnvironmentError(finished.back() + ": cannot rename: " + error.message());
    }
    Say(finished.back() + " is set aside as " + aside);
    finished.pop_back();
  }
}

std::vector<std::string> Differences(const std::vector<SavedSetting>& before,
                                     const std::vector<SavedSetting>& now) {
  std::vector<std::string> lines;
  for (const auto& [name, value] : now) {
    for (const auto& [old_name, old_value] : before) {
      if (old_name == name && old_value != value) {
        lines.push_back(name + " " + value + ", was " + old_value);
      }
    }
  }
  return lines;
}

std::string NewestCheckpoint(const std::string& folder, MessagePassing* processes) {
  std::string newest = FindLatestCheckpoint(folder);
  if (processes == nullptr) {
    return newest;
  }
  return TextOf(
      ShareBytes(*processes, MessagePassing::kAll, {"newest checkpoint"}, BytesOf(newest)).front());
}

void VerifyShare(const Checkpoint& checkpoint, const MessagePassing* processes) {
  if (processes == nullptr) {
    checkpoint.Verify();
  } else {
    checkpoint.Verify(static_cast<std::size_t>(processes->rank()),
                      static_cast<std::size_t>(processes->size()));
  }
}

void Resume(const Checkpoint& checkpoint, Runtime& runtime, bool with_states) {
  const Manifest& manifest = checkpoint.manifest();
  const bool loads_states = with_states && HasStates(manifest);
  for (const Rank r : runtime.LocalRanks()) {
    LoadState(ReaderOf(checkpoint), runtime.InputOf(r).job.optimizer.kind, StateOf(runtime, r),
              loads_states);
  }
  runtime.set_next_step(manifest.step);
  if (loads_states) {
    runtime.set_loss_scaler(manifest.loss_scaler, manifest.step - manifest.update);
  }
}

void StartFrom(const HubWeights& weights, Runtime& runtime) {
  const TensorReader read = [&](const std::string& name, std::int64_t begin, std::int64_t count,
                                DType dtype,
                                void* out) { return weights.Read(name, begin, count, dtype, out); };
  for (const Rank r : runtime.LocalRanks()) {
    LoadState(read, runtime.InputOf(r).job.optimizer.kind, StateOf(runtime, r), false);
  }
}

void CopyParameters(const Runtime& from, const Runtime& to) {
  SW_CHECK(from.rank_count() == to.rank_count(), "two runtimes of one plan");
  for (const Rank r : from.LocalRanks()) {
    std::int64_t buffer_elements = 0;
    for (const Module& module : from.InputOf(r).model.modules) {
      buffer_elements += module.buffer_elements;
    }
    const RankState source = StateOf(from, r);
    const RankState target = StateOf(to, r);
    CopyUnits(source.units, target.units, target.copy);
    if (source.model_buffers != nullptr && target.model_buffers != nullptr) {
      target.copy(target.model_buffers, source.model_buffers,
                  buffer_elements * static_cast<std::int64_t>(sizeof(float)));
    }
  }
}

}  // namespace shardwright
