#include "executor/checkpoint/checkpoint.h"

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "core/error.h"
#include "core/json.h"
#include "executor/checkpoint/run_folder.h"
#include "executor/checkpoint/safetensors.h"
#include "executor/checkpoint/save.h"
#include "executor/checkpoint/state.h"
#include "executor/half.h"
#include "executor/initialize.h"
#include "models/loader.h"
#include "schedule/lower/layout.h"
#include "tests/executor/scratch_folder.h"

namespace {
int flock_error = 0;  // of the next calls; 0: none
}  // namespace

// In the place of the C library's: as on a file system that has no locks.
extern "C" int flock(int descriptor, int operation) noexcept {
  if (flock_error != 0) {
    errno = flock_error;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_flock, descriptor, operation));
}

namespace shardwright {
namespace {

using testing::ScratchFolder;

constexpr std::array<const char*, 3> kLayoutNames = {"rows", "flat", "native"};

Model SmallNet() {
  // A convolution, a batch norm with buffers, and a linear layer with a bias of an odd size.
  const char* text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"image": {"shape": [3, 6, 6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "conv", "class": "Conv2d", "params": [{"name": "weight", "shape": [5, 3, 3, 3]}]},
      {"name": "bn", "class": "BatchNorm2d", "buffers": 11,
       "params": [{"name": "weight", "shape": [5]}, {"name": "bias", "shape": [5]}]},
      {"name": "fc", "class": "Linear",
       "params": [{"name": "weight", "shape": [7, 80]}, {"name": "bias", "shape": [7]}]}],
    "ops": [
      {"op": "conv2d", "module": "conv", "inputs": ["image"], "output": "x1"},
      {"op": "batch_norm", "module": "bn", "inputs": ["x1"], "output": "x2"},
      {"op": "flatten", "inputs": ["x2"], "output": "x3"},
      {"op": "linear", "module": "fc", "inputs": ["x3"], "output": "x4"},
      {"op": "log_softmax", "inputs": ["x4"], "output": "x5"},
      {"op": "nll_loss", "inputs": ["x5", "label"], "output": "loss"}]})";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

Job JobOf(DType master) {
  Job job;
  job.precision.master = master;
  job.optimizer.kind = OptimizerKind::kAdamW;
  return job;
}

// The memory of all ranks of a model that is one unit, cut by one of the layouts.
struct Ranks {
  const Model* model = nullptr;
  std::vector<std::vector<std::byte>> memory = {};  // per rank: parameters, then two states
  std::vector<BoundUnit> units = {};                // per rank
  std::vector<std::vector<float>> buffers = {};     // per rank

  Ranks(const Model& whole, std::int64_t shards, std::size_t layout, DType dtype) : model(&whole) {
    Plan plan;
    UnitPlan root;
    root.name = "root";
    root.modules = {""};
    plan.units.push_back(root);
    const ResolvedUnit unit = ResolveUnits(whole, plan, "test").front();
    const UnitInfo info = layout == 0   ? LayoutPerParameter(whole, unit, shards)
                          : layout == 1 ? LayoutFlat(whole, unit, shards, true, DType::kFp32)
                                        : LayoutNative(whole, unit, shards, DType::kBf16);
    std::int64_t buffer_elements = 0;
    for (const Module& module : whole.modules) {
      buffer_elements += module.buffer_elements;
    }
    for (std::int64_t s = 0; s < shards; ++s) {
      BoundUnit bound;
      bound.pieces = ShardPieces(whole, info, s, shards);
      bound.elements = info.shard_elements;
      bound.dtype = dtype;
      const std::int64_t bytes = info.shard_elements * SizeOf(dtype);
      memory.emplace_back(static_cast<std::size_t>(3 * bytes), std::byte{0xee});
      bound.parameters = memory.back().data();
      bound.states = {{bound.pieces, {bound.parameters + bytes, bound.parameters + 2 * bytes}}};
      units.push_back(bound);
      buffers.emplace_back(static_cast<std::size_t>(buffer_elements), -1.0F);
    }
  }

  [[nodiscard]] RankState StateOf(std::size_t rank) {
    return {*model,
            {&units[rank], 1},
            buffers[rank].empty() ? nullptr : buffers[rank].data(),
            std::memcpy};
  }

  // Every tensor gets numbers that depend on its name and the element alone.
  void Fill() {
    const InitRule rule = {InitRule::Kind::kNormal, 0.0, 1.0};
    for (std::size_t r = 0; r < units.size(); ++r) {
      const BoundUnit& unit = units[r];
      std::memset(memory[r].data(), 0, memory[r].size());
      for (const ShardPiece& piece : unit.pieces) {
        const std::string& fqn = model->params[piece.param.value].fqn;
        const std::vector<std::byte*>& states = unit.states[0].data;
        const std::array<std::byte*, 3> arrays = {unit.parameters, states[0], states[1]};
        for (std::size_t k = 0; k < arrays.size(); ++k) {
          FillParameter(rule, InitKey(k, fqn), piece.param_begin, piece.count, unit.dtype,
                        arrays[k] + piece.shard_offset * SizeOf(unit.dtype));
        }
      }
      for (std::size_t i = 0; i < buffers[r].size(); ++i) {
        buffers[r][i] = static_cast<float>(i) + 3.0F;
      }
    }
  }
};

Manifest ManifestOf(const Model& model, const Job& job, std::int64_t step) {
  Manifest manifest;
  DescribeState(model, job, manifest);
  manifest.run = "0123456789abcdef";
  manifest.dialect = "fsdp2";
  manifest.step = step;
  manifest.update = step - 1;
  manifest.loss_scaler = {1024.0, 7};
  manifest.sampler = {.dataset_size = 100, .global_batch = 8, .seed = 5};
  return manifest;
}

std::string Save(const std::string& folder, const Model& model, Ranks& ranks, const Job& job,
                 std::int64_t step = 10) {
  MakeCheckpointFolder(folder);
  CheckpointWriter writer(folder, step);
  for (std::size_t r = 0; r < ranks.units.size(); ++r) {
    RankState state = ranks.StateOf(r);
    state.model_buffers = r == 0 ? state.model_buffers : nullptr;
    writer.WriteRank(static_cast<std::int64_t>(r), {StretchesOf(job.optimizer.kind, state)});
  }
  return writer.Commit(ManifestOf(model, job, step));
}

template <class Work>
std::string ErrorOf(const Work& work) {
  try {
    work();
  } catch (const InputError& error) {
    return error.what();
  } catch (const EnvironmentError& error) {
    return error.what();
  }
  return "no error";
}

TEST_CASE("what W ranks save under one layout, any number loads under any other") {
  const Model model = SmallNet();
  const Job job = JobOf(DType::kFp32);
  for (std::size_t saved = 0; saved < kLayoutNames.size(); ++saved) {
    for (const std::int64_t from : {1, 4}) {
      const ScratchFolder folder;
      Ranks ranks(model, from, saved, DType::kFp32);
      ranks.Fill();
      const Checkpoint checkpoint(Save(folder.File("c"), model, ranks, job));
      checkpoint.Verify();
      CheckFits(checkpoint, model, OptimizerKind::kAdamW);
      for (std::size_t layout = 0; layout < kLayoutNames.size(); ++layout) {
        for (const std::int64_t to : {1, 2, 3, 4, 8}) {
          CAPTURE(kLayoutNames[saved]);
          CAPTURE(kLayoutNames[layout]);
          CAPTURE(from);
          CAPTURE(to);
          Ranks expected(model, to, layout, DType::kFp32);
          expected.Fill();
          Ranks loaded(model, to, layout, DType::kFp32);
          for (std::size_t r = 0; r < loaded.units.size(); ++r) {
            std::memset(loaded.units[r].states[0].data[0], 0, loaded.memory[r].size() / 3 * 2);
            LoadState(ReaderOf(checkpoint), OptimizerKind::kAdamW, loaded.StateOf(r), true);
          }
          CHECK(loaded.memory == expected.memory);
          CHECK(loaded.buffers == expected.buffers);
        }
      }
    }
  }
}

TEST_CASE("16-bit states stay what they are, and change dtype by one rounding") {
  const Model model = SmallNet();
  const ScratchFolder folder;
  Ranks ranks(model, 3, 0, DType::kBf16);
  ranks.Fill();
  const Checkpoint checkpoint(Save(folder.File("c"), model, ranks, JobOf(DType::kBf16)));
  Ranks same(model, 2, 1, DType::kBf16), expected(model, 2, 1, DType::kBf16);
  expected.Fill();
  for (std::size_t r = 0; r < 2; ++r) {
    std::memset(same.units[r].states[0].data[0], 0, same.memory[r].size() / 3 * 2);
    LoadState(ReaderOf(checkpoint), OptimizerKind::kAdamW, same.StateOf(r), true);
  }
  CHECK(same.memory == expected.memory);
  float wide = 0.0F;
  std::uint16_t narrow = 0;
  checkpoint.Read("fc.weight", 123, 1, DType::kFp32, &wide);
  checkpoint.Read("fc.weight", 123, 1, DType::kBf16, &narrow);
  CHECK(wide == Bf16ToFloat(narrow));
}

TEST_CASE("the manifest keeps everything, and notices a changed byte") {
  const Model model = SmallNet();
  Manifest manifest = ManifestOf(model, JobOf(DType::kFp32), 42);
  manifest.aliases = {{"head.weight", "fc.weight"}};
  manifest.files = {{"rank-00000.safetensors", 123, 0xdeadbeef, {{"fc.weight", 0, 560}}}};
  const std::string text = ManifestJson(manifest);
  CHECK(ParseManifest(text, "m.json") == manifest);
  CHECK(manifest.tensors.size() == 5 * 3 + 3);
  std::string changed = text;
  const std::size_t at = changed.find("\"step\": 42");
  REQUIRE(at != std::string::npos);
  changed[at + 8] = '5';
  const std::string error = ErrorOf([&] { (void)ParseManifest(changed, "m.json"); });
  CHECK(error.starts_with("m.json: got CRC-32 "));
  CHECK(error.ends_with(", as its last field says; the manifest is damaged"));
  for (std::size_t cut = 0; cut < text.size(); cut += 97) {
    CHECK(ErrorOf([&] { (void)ParseManifest(text.substr(0, cut), "m.json"); }) != "no error");
  }
}

TEST_CASE("damaged, torn and foreign checkpoints are told apart") {
  const Model model = SmallNet();
  const Job job = JobOf(DType::kFp32);
  const ScratchFolder folder;
  Ranks ranks(model, 2, 0, DType::kFp32);
  ranks.Fill();
  const std::string path = Save(folder.File("c"), model, ranks, job);
  CHECK(path == folder.File("c") + "/step-00000010");
  const std::string shard = path + "/rank-00001.safetensors";
  const std::string whole = ReadTextFile(shard);
  const auto open = [&] {
    return ErrorOf([&] {
      const Checkpoint checkpoint(path);
      checkpoint.Verify();
    });
  };
  CHECK(open() == "no error");

  std::string damaged = whole;
  damaged[damaged.size() - 5] = static_cast<char>(damaged[damaged.size() - 5] ^ 1);
  WriteFileAtomically(shard, damaged);
  const std::string error = open();
  CHECK(error.starts_with(shard + ": got CRC-32 "));
  CHECK(error.ends_with(", as the manifest says; the file is damaged"));

  WriteFileAtomically(shard, whole.substr(0, whole.size() - 4));
  CHECK(open() == shard + ": got " + std::to_string(whole.size() - 4) + " bytes, expected " +
                      std::to_string(whole.size()) + ", as the manifest says");
  std::filesystem::remove(shard);
  CHECK(open() == shard + ": got no such file, expected a readable file");
  WriteFileAtomically(shard, whole);
  CHECK(open() == "no error");

  std::filesystem::rename(path + "/manifest.json", path + "/m");
  CHECK(open() == path + ": got no manifest.json, expected a finished checkpoint");
  std::filesystem::rename(path + "/m", path + "/manifest.json");

  const Checkpoint checkpoint(path);
  const auto fits = [&](const Model& other, OptimizerKind kind) {
    return ErrorOf([&] { CheckFits(checkpoint, other, kind); });
  };
  CHECK(fits(model, OptimizerKind::kAdamW) == "no error");
  CHECK(fits(model, OptimizerKind::kAdadelta) ==
        path + ": got states of adamw, expected states of adadelta, the plan's optimizer");
  Model other = model;
  other.params[3].shape = {14, 40};
  CHECK(fits(other, OptimizerKind::kAdamW) ==
        path + ": tensor \"fc.weight\": got shape [7, 80], expected [14, 40], as in net");
  other = model;
  other.params[3].fqn = "fc.weights";
  CHECK(fits(other, OptimizerKind::kAdamW) ==
        path +
            ": got no tensor \"fc.weights\", expected one of that name; did you mean "
            "\"fc.weight\"?");
  other = model;
  other.params.pop_back();
  CHECK(fits(other, OptimizerKind::kAdamW) ==
        path + ": got 5 parameters of net, expected the 4 of net");

  Sampler sampler = {.dataset_size = 100, .global_batch = 8, .seed = 5};
  CHECK(ErrorOf([&] { CheckContinues(checkpoint, sampler); }) == "no error");
  sampler.global_batch = 16;
  CHECK(ErrorOf([&] { CheckContinues(checkpoint, sampler); }) ==
        path +
            ": got a global batch of 8, expected 16, since a resumed run goes on with the same "
            "samples");
}

TEST_CASE("stretches that leave a gap or overlap are refused") {
  const ScratchFolder folder;
  const Model model = SmallNet();
  const std::array<float, 20> data = {};
  const auto error = [&](std::int64_t begin, std::int64_t count, std::int64_t last = 20) {
    Manifest manifest;
    manifest.sampler.dataset_size = 1;
    manifest.tensors = {{"a", TensorKind::kParameter, DType::kFp32, {4, 5}}};
    manifest.step = 1;
    MakeCheckpointFolder(folder.File("c"));
    CheckpointWriter writer(folder.File("c"), 1);
    writer.WriteRank(0, {{{{"a", 0, 10}, DType::kFp32, data.data()}}});
    writer.WriteRank(1, {{{{"a", begin, count}, DType::kFp32, data.data()}}});
    if (last < 20) {
      writer.WriteRank(2, {{{{"a", last, 20 - last}, DType::kFp32, data.data()}}});
    }
    const std::string path = writer.Commit(manifest);
    const std::string text = ErrorOf([&] { const Checkpoint checkpoint(path); });
    const std::string file = path + "/manifest.json";
    return text.starts_with(file) ? text.substr(file.size()) : text;
  };
  CHECK(error(10, 10) == "no error");
  CHECK(error(11, 9) ==
        ": got stretches of \"a\" that end at element 10, expected stretches that "
        "cover all 20 once");
  CHECK(error(9, 11) ==
        ": got stretches of \"a\" that end at element 10, expected stretches that "
        "cover all 20 once");
  CHECK(error(10, 9) ==
        ": got stretches of \"a\" that end at element 19, expected stretches that "
        "cover all 20 once");
  // An empty one is allowed; one inside of another, before a last one that ends right, is not.
  CHECK(error(10, 0, 10) == "no error");
  for (const std::int64_t inside : {0, 3, 9}) {
    CHECK(error(inside, 1, 10) != "no error");
    CHECK(error(inside, 20 - inside, 16) != "no error");
  }
}

TEST_CASE("a checkpoint appears whole or not at all, and replaces one of its step") {
  const Model model = SmallNet();
  const Job job = JobOf(DType::kFp32);
  const ScratchFolder folder;
  const std::string base = folder.File("c");
  Ranks ranks(model, 2, 1, DType::kFp32);
  ranks.Fill();
  CHECK(FindLatestCheckpoint(base).empty());
  MakeCheckpointFolder(base);
  {
    CheckpointWriter writer(base, 3);
    writer.WriteRank(0, {StretchesOf(job.optimizer.kind, ranks.StateOf(0))});
    CHECK(FindLatestCheckpoint(base).empty());
  }
  CHECK(std::filesystem::is_empty(base));
  const std::string third = Save(base, model, ranks, job, 3);
  CHECK(FindLatestCheckpoint(base) == third);
  CHECK(FindLatestCheckpoint(third) == third);
  const std::string tenth = Save(base, model, ranks, job, 10);
  CHECK(FindLatestCheckpoint(base) == tenth);
  // Steps are compared as numbers: nine digits come after eight.
  const std::string late = Save(base, model, ranks, job, 123456789);
  CHECK(FindLatestCheckpoint(base) == late);
  // Somebody's copy is no later one, and none of those that are kept.
  const std::string copy = third + "-before-the-change";
  std::filesystem::copy(third, copy);
  CHECK(FindLatestCheckpoint(base) == late);
  CHECK(FindLatestCheckpoint(copy) == copy);
  // The same step again, with other contents.
  std::memset(ranks.memory[0].data(), 0, ranks.memory[0].size());
  CHECK(Save(base, model, ranks, job, 10) == tenth);
  float first = -1.0F;
  Checkpoint(tenth).Read("conv.weight", 0, 1, DType::kFp32, &first);
  CHECK(first == 0.0F);
  // Nobody can tell the folder of a writer before, and what is there is not its.
  const std::string guessed = base + "/.unfinished-step-00000010-" + std::to_string(::getpid());
  std::filesystem::create_directory(guessed);
  CHECK(Save(base, model, ranks, job, 10) == tenth);
  CHECK(std::filesystem::exists(guessed));
  // What a killed writer leaves is ignored, and removed.
  std::filesystem::create_directory(base + "/.unfinished-step-00000011-1");
  std::filesystem::create_directory(base + "/step-99999999999");
  CHECK(FindLatestCheckpoint(base) == late);
  RemoveUnfinishedCheckpoints(base);
  CHECK_FALSE(std::filesystem::exists(base + "/.unfinished-step-00000011-1"));
  // Another run's count for nothing, nor do later steps, whose manifest nobody could read.
  const std::string run = ManifestOf(model, job, 1).run;
  RemoveOldCheckpoints(base, 1, "fedcba9876543210", 123456789);
  RemoveOldCheckpoints(base, 2, run, 10);
  CHECK(std::filesystem::exists(third));
  CHECK(std::filesystem::exists(late));
  RemoveOldCheckpoints(base, 2, run, 123456789);
  CHECK_FALSE(std::filesystem::exists(third));
  CHECK(std::filesystem::exists(tenth));
  CHECK(std::filesystem::exists(late));
  CHECK(std::filesystem::exists(copy));
}

TEST_CASE("a folder belongs to one run") {
  const Model model = SmallNet();
  const ScratchFolder scratch;
  const std::string base = scratch.File("c");
  {
    const RunFolder folder(base, false);
    const std::string error = ErrorOf([&] { const RunFolder other(base, true); });
    CHECK(error.starts_with(base + ": another run (process " + std::to_string(::getpid())));
    CHECK(error.ends_with(
        " is at work in it; give another --checkpoint FOLDER, or wait for its end"));
  }
  { const RunFolder again(base, false); }  // nothing was saved, and nobody holds it any more
  Ranks ranks(model, 1, 0, DType::kFp32);
  ranks.Fill();
  const std::string saved = Save(base, model, ranks, JobOf(DType::kFp32));
  { const RunFolder resumed(base, true); }
  CHECK(ErrorOf([&] { const RunFolder fresh(base, false); }) ==
        base + ": got checkpoints of an earlier run, the newest " + saved +
            ", expected a folder without any; --resume goes on from there, another --checkpoint "
            "FOLDER begins anew");
  CHECK(ErrorOf([&] { const RunFolder inside(saved, true); }) ==
        saved + ": got a checkpoint, expected a folder for checkpoints, such as the one it is in");
  CHECK(NewRunId() != NewRunId());
  CHECK(NewRunId().size() == 16);
}

TEST_CASE("ranks know the folder of a file system without locks") {
  const ScratchFolder scratch;
  const std::string base = scratch.File("c");
  flock_error = ENOLCK;
  const RunFolder folder(base, false);
  flock_error = 0;
  CHECK(RunFolder::LockIn(base).starts_with("process " + std::to_string(::getpid()) + " on "));
  CHECK(RunFolder::LockIn(scratch.File("other")) == "none");
  std::filesystem::resize_file(base + "/.lock", 0);
  CHECK(RunFolder::LockIn(base) == "empty");
  // A rank that does not find the folder makes none.
  CHECK(ErrorOf([&] { CheckCheckpointFolder(scratch.File("other")); }) ==
        scratch.File("other") + ": cannot write into: No such file or directory");
  CHECK(!std::filesystem::exists(scratch.File("other")));
}

TEST_CASE("a folder that is no longer the run's is told from one that is") {
  const ScratchFolder scratch;
  const std::string base = scratch.File("c"), moved = scratch.File("moved");
  const std::string problem = base +
                              ": no longer the folder that this run has locked: it was removed, "
                              "renamed or replaced; put it back";
  const RunFolder folder(base, false);
  CHECK_NOTHROW(folder.CheckPlace());
  CHECK(RunFolder::LockIn(base).starts_with("process " + std::to_string(::getpid()) + " on "));
  std::filesystem::rename(base, moved);
  CHECK(ErrorOf([&] { folder.CheckPlace(); }) == problem);
  CHECK(RunFolder::LockIn(base) == "none");
  { const RunFolder other(base, false); }  // one of the same name, with a lock
  CHECK(ErrorOf([&] { folder.CheckPlace(); }) == problem);
  CHECK(RunFolder::LockIn(base) != RunFolder::LockIn(moved));
  std::filesystem::remove_all(base);
  std::filesystem::create_directory(scratch.File("other"));
  std::filesystem::create_directory_symlink(scratch.File("other"), base);
  CHECK(ErrorOf([&] { folder.CheckPlace(); }) == problem);
  // A link to where it lies now is another way to the same folder.
  std::filesystem::remove(base);
  std::filesystem::create_directory_symlink(moved, base);
  CHECK_NOTHROW(folder.CheckPlace());
}

TEST_CASE("a folder's name that disagrees with its manifest is not believed") {
  const Model model = SmallNet();
  const Job job = JobOf(DType::kFp32);
  const ScratchFolder scratch;
  const std::string base = scratch.File("c");
  Ranks ranks(model, 1, 0, DType::kFp32);
  ranks.Fill();
  const std::string fifth = Save(base, model, ranks, job, 5);
  const std::string ninth = base + "/step-00000009";
  std::filesystem::copy(fifth, ninth);
  for (const std::string& name : {ninth, ninth + "/", ninth + "/."}) {
    const std::string error = ErrorOf([&] { const Checkpoint checkpoint(name); });
    CHECK(
        error.ends_with("manifest.json: got step 5, expected 9, as the folder's name says; the "
                        "folder was renamed or copied"));
  }
  // It is not removed, and no other one for it.
  const std::string eighth = Save(base, model, ranks, job, 8);
  RemoveOldCheckpoints(base, 1, ManifestOf(model, job, 1).run, 9);
  CHECK(FinishedCheckpoints(base) == std::vector<std::string>{eighth, ninth});
}

// No file may grow beyond `bytes` while this exists, as on a full disk: writes fail with EFBIG.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_CASE("a full disk ends in one line, and the last good checkpoint stays") {
  const Model model = SmallNet();
  const Job job = JobOf(DType::kFp32);
  const ScratchFolder folder;
  const std::string base = folder.File("c");
  Ranks ranks(model, 1, 1, DType::kFp32);
  ranks.Fill();
  const std::string good = Save(base, model, ranks, job, 1);
  std::string error;
  {
    const FileSizeLimit limit(2000);
    error = ErrorOf([&] { (void)Save(base, model, ranks, job, 2); });
  }
  CHECK(error.starts_with(base + "/.unfinished-step-00000002-"));
  CHECK(error.ends_with("/rank-00000.safetensors: cannot write: File too large"));
  CHECK(FindLatestCheckpoint(base) == good);
  Checkpoint(good).Verify();
  CHECK(std::distance(std::filesystem::directory_iterator(base), {}) == 1);
  CHECK(ErrorOf([&] { (void)Save("/proc/none", model, ranks, job); }) ==
        "/proc/none: cannot create: No such file or directory");
}

// More than two of the writer's pieces, read through `copy`, in another dtype, and a tensor whose
// stretches follow one another.
TEST_CASE("elements are written from where they lie, in bounded pieces") {
  const ScratchFolder folder;
  constexpr std::int64_t kCount = kPieceBytes / 4 + 5;
  std::vector<float> values(kCount);
  for (std::int64_t i = 0; i < kCount; ++i) {
    values[static_cast<std::size_t>(i)] = static_cast<float>(i % 251);  // exact in bf16
  }
  std::int64_t most = 0;
  RankShare share;
  share.stretches = {{{"a", 0, kCount}, DType::kFp32, values.data()},
                     {{"b", 0, kCount}, DType::kFp32, values.data(), DType::kBf16},
                     {{"c", 0, 10}, DType::kFp32, values.data() + 7},
                     {{"c", 10, 20}, DType::kFp32, values.data() + 17}};
  share.copy = [&](void* to, const void* from, std::int64_t bytes) {
    most = std::max(most, bytes);
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  };
  Manifest manifest;
  manifest.sampler.dataset_size = 1;
  manifest.tensors = {{"a", TensorKind::kParameter, DType::kFp32, {kCount}},
                      {"b", TensorKind::kParameter, DType::kBf16, {kCount}},
                      {"c", TensorKind::kParameter, DType::kFp32, {30}}};
  for (const bool from_snapshot : {false, true}) {
    if (from_snapshot) {
      TakeSnapshot(share);
    }
    manifest.step = 1;
    MakeCheckpointFolder(folder.File(from_snapshot ? "s" : "c"));
    CheckpointWriter writer(folder.File(from_snapshot ? "s" : "c"), 1);
    writer.WriteRank(0, share);
    const Checkpoint checkpoint(writer.Commit(manifest));
    checkpoint.Verify();
    CHECK(most <= kPieceBytes);
    std::vector<float> read(kCount);
    for (const char* const name : {"a", "b"}) {
      checkpoint.Read(name, 0, kCount, DType::kFp32, read.data());
      CHECK(read == values);
    }
    checkpoint.Read("c", 0, 30, DType::kFp32, read.data());
    CHECK(std::equal(read.begin(), read.begin() + 30, values.begin() + 7));
  }
}

TEST_CASE("the background writes a snapshot while the original changes, and hands errors back") {
  const ScratchFolder folder;
  std::vector<float> values(1000, 1.5F);
  Manifest manifest;
  manifest.sampler.dataset_size = 1;
  manifest.tensors = {{"a", TensorKind::kParameter, DType::kFp32, {1000}}};
  MakeCheckpointFolder(folder.File("c"));
  BackgroundWriter background;
  const auto save = [&](std::int64_t step) {
    manifest.step = step;
    const auto share =
        std::make_shared<RankShare>(RankShare{{{{"a", 0, 1000}, DType::kFp32, values.data()}}});
    TakeSnapshot(*share);
    background.Start([&folder, manifest, share, step] {
      CheckpointWriter writer(folder.File("c"), step);
      writer.WriteRank(0, *share);
      writer.Commit(manifest);
    });
  };
  for (std::int64_t step = 1; step <= 3; ++step) {
    save(step);
    for (float& value : values) {
      value += 1.0F;
    }
  }
  background.Wait();
  for (std::int64_t step = 1; step <= 3; ++step) {
    std::vector<float> read(1000);
    Checkpoint(folder.File("c") + "/step-0000000" + std::to_string(step))
        .Read("a", 0, 1000, DType::kFp32, read.data());
    CHECK(read == std::vector<float>(1000, 0.5F + static_cast<float>(step)));
  }
  background.Start([] { throw EnvironmentError("disk: cannot write: full"); });
  CHECK(ErrorOf([&] { background.Wait(); }) == "disk: cannot write: full");
  CHECK(ErrorOf([&] { background.Wait(); }) == "no error");
}

TEST_CASE("an exported file holds the parameters and running statistics under PyTorch's names") {
  const Model model = SmallNet();
  const ScratchFolder folder;
  Ranks ranks(model, 3, 1, DType::kFp32);
  ranks.Fill();
  const Checkpoint checkpoint(Save(folder.File("c"), model, ranks, JobOf(DType::kFp32)));
  const std::string file = folder.File("net.safetensors");
  ExportCheckpoint(checkpoint, file, {});
  const SafetensorsHeader header = ReadSafetensorsHeader(file);
  const std::string text = ReadTextFile(file);
  std::string names;
  for (const SafetensorsEntry& entry : header.entries) {
    names += entry.name + " ";
    const char* data = text.data() + header.data_begin + entry.begin;
    if (entry.name == "fc.weight") {
      CHECK(entry.shape == std::vector<std::int64_t>{7, 80});
      std::vector<float> expected(560), found(560);
      FillParameter({InitRule::Kind::kNormal, 0.0, 1.0}, InitKey(0, "fc.weight"), 0, 560,
                    DType::kFp32, expected.data());
      std::memcpy(found.data(), data, 4 * 560);
      CHECK(found == expected);
    }
    if (entry.name == "bn.num_batches_tracked") {
      std::int64_t count = 0;
      std::memcpy(&count, data, 8);
      CHECK(count == 13);  // buffer element 10, filled with 10 + 3
      CHECK(entry.shape.empty());
      CHECK(entry.dtype == DType::kInt64);
    }
  }
  CHECK(names ==
        "bn.num_batches_tracked bn.bias bn.running_mean bn.running_var bn.weight "
        "conv.weight fc.bias fc.weight ");
  CHECK(header.metadata.at("format") == "pt");
  ExportCheckpoint(checkpoint, file, {.dtype = DType::kBf16});
  CHECK(ReadSafetensorsHeader(file).entries.back().dtype == DType::kBf16);
  CHECK(ErrorOf([&] {
          ExportCheckpoint(checkpoint, folder.File("no/such"), {});
        }).ends_with(": cannot write: No such file or directory"));
}

TEST_CASE("the names of Transformers 5: one tensor for the experts of a layer, ViT's layers") {
  const auto tensor = [](const std::string& name, std::vector<std::int64_t> shape) {
    return SavedTensor{name, TensorKind::kParameter, DType::kFp32, std::move(shape)};
  };
  const std::string moe = "model.layers.3.block_sparse_moe.";
  const std::vector<SavedTensor> mixture = {
      tensor(moe + "gate.weight", {2, 6}),         tensor(moe + "experts.0.w1.weight", {4, 6}),
      tensor(moe + "experts.0.w2.weight", {6, 4}), tensor(moe + "experts.0.w3.weight", {4, 6}),
      tensor(moe + "experts.1.w1.weight", {4, 6}), tensor(moe + "experts.1.w2.weight", {6, 4}),
      tensor(moe + "experts.1.w3.weight", {4, 6})};
  const std::vector<HubTensor> five = HubTensorsOf(mixture, HubNames::kModules5);
  REQUIRE(five.size() == 3);
  CHECK(five[0].name == "model.layers.3.mlp.gate.weight");
  CHECK(five[1].name == "model.layers.3.mlp.experts.gate_up_proj");
  CHECK(five[1].shape == std::vector<std::int64_t>{2, 8, 6});
  CHECK(five[1].parts ==
        std::vector<std::string>{moe + "experts.0.w1.weight", moe + "experts.0.w3.weight",
                                 moe + "experts.1.w1.weight", moe + "experts.1.w3.weight"});
  CHECK(five[2].name == "model.layers.3.mlp.experts.down_proj");
  CHECK(five[2].shape == std::vector<std::int64_t>{2, 6, 4});
  CHECK(HubTensorsOf(mixture, HubNames::kHub)[1].name == mixture[1].name);
  const std::string layer = "vit.encoder.layer.0.";
  const std::vector<SavedTensor> vit = {tensor(layer + "attention.attention.query.weight", {4, 4}),
                                        tensor(layer + "attention.output.dense.bias", {4}),
                                        tensor(layer + "intermediate.dense.weight", {8, 4}),
                                        tensor(layer + "output.dense.weight", {4, 8}),
                                        tensor(layer + "layernorm_before.bias", {4})};
  std::string names;
  for (const HubTensor& one : HubTensorsOf(vit, HubNames::kModules5)) {
    names += one.name.substr(std::string("vit.layers.0.").size()) + " ";
  }
  CHECK(names ==
        "attention.q_proj.weight attention.o_proj.bias mlp.fc1.weight mlp.fc2.weight "
        "layernorm_before.bias ");
  // BERT's layers have some of ViT's names.
  const std::vector<SavedTensor> bert = {
      tensor("bert.encoder.layer.0.intermediate.dense.weight", {8, 4})};
  CHECK(HubTensorsOf(bert, HubNames::kModules5)[0].name == bert[0].name);
}

}  // namespace
}  // namespace shardwright
