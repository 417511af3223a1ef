#include "executor/checkpoint/save.h"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/staged_file.h"
#include "core/text.h"
#include "core/threads.h"
#include "executor/checkpoint/output_file.h"
#include "executor/checkpoint/safetensors.h"
#include "executor/half.h"

namespace shardwright {
namespace {

constexpr const char* kTemporaryPrefix = ".unfinished-";
constexpr std::string_view kStepPrefix = "step-";

EnvironmentError Cannot(const std::string& what, const std::string& path, int error) {
  return EnvironmentError(path + ": cannot " + what + ": " + std::strerror(error));
}

std::string StepName(std::int64_t step) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%08lld", static_cast<long long>(step));
  return std::string(kStepPrefix) + text.data();
}

std::int64_t RandomNumber() {
  std::random_device random;
  return std::uniform_int_distribution<std::int64_t>(1)(random);
}

std::string RankFileName(std::int64_t rank) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "rank-%05lld.safetensors", static_cast<long long>(rank));
  return text.data();
}

// Puts `from` in the place of `to`, which may hold an older checkpoint: the two are exchanged in
// one step, so that at every moment a whole one is there.
void Replace(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) {
    return;
  }
  if (errno != ENOTEMPTY && errno != EEXIST) {
    throw Cannot("write", to, errno);
  }
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) != 0) {
    throw Cannot("replace", to, errno);
  }
  std::error_code ignored;
  std::filesystem::remove_all(from, ignored);
}

// Finite are all numbers whose exponent has a bit that is 0.
template <class Bits>
bool HaveFiniteExponents(const std::byte* data, std::int64_t bytes, Bits exponent) {
  std::int64_t others = 0;
  for (std::int64_t at = 0; at < bytes; at += static_cast<std::int64_t>(sizeof(Bits))) {
    Bits bits{};
    std::memcpy(&bits, data + at, sizeof bits);
    others += (bits & exponent) == exponent ? 1 : 0;
  }
  return others == 0;
}

bool AreFinite(DType dtype, const std::byte* data, std::int64_t bytes) {
  switch (dtype) {
    case DType::kFp32:
      return HaveFiniteExponents<std::uint32_t>(data, bytes, 0x7f800000U);
    case DType::kBf16:
      return HaveFiniteExponents<std::uint16_t>(data, bytes, 0x7f80U);
    case DType::kFp16:
      return HaveFiniteExponents<std::uint16_t>(data, bytes, 0x7c00U);
    default:
      return true;
  }
}

// Calls take(data, bytes) with all elements of a stretch in the dtype that they are saved in, piece
// by piece. Pieces lie in `buffer`, unless they can be read where they are.
template <class Take>
void ForEachPiece(const StretchData& stretch, const MemoryCopy& copy,
                  std::vector<std::byte>& buffer, const Take& take) {
  const DType to = stretch.SavedDType();
  const auto* from = static_cast<const std::byte*>(stretch.data);
  const bool is_same = to == stretch.dtype;
  if (is_same && !copy) {
    take(from, stretch.stretch.count * SizeOf(to));
    return;
  }
  const std::int64_t width = SizeOf(stretch.dtype);
  const std::int64_t room = width + (is_same ? 0 : SizeOf(to));  // of an element
  const std::int64_t most = kPieceBytes / room;
  buffer.resize(static_cast<std::size_t>(std::min(stretch.stretch.count, most) * room));
  for (std::int64_t i = 0; i < stretch.stretch.count; i += most) {
    const std::int64_t count = std::min(most, stretch.stretch.count - i);
    const std::byte* piece = from + i * width;
    if (copy) {
      copy(buffer.data(), piece, count * width);
      piece = buffer.data();
    }
    if (!is_same) {
      std::byte* const converted = buffer.data() + count * width;
      for (std::int64_t k = 0; k < count; ++k) {
        StoreFloat(to, converted, k, LoadFloat(stretch.dtype, piece, k));
      }
      piece = converted;
    }
    take(piece, count * SizeOf(to));
  }
}

}  // namespace

bool IsFinite(const RankShare& share) {
  std::vector<std::byte> buffer;
  bool is_finite = true;
  for (const StretchData& stretch : share.stretches) {
    if (!stretch.stretch.tensor.starts_with(kStatePrefix)) {
      ForEachPiece(stretch, share.copy, buffer, [&](const std::byte* data, std::int64_t bytes) {
        is_finite = is_finite && AreFinite(stretch.SavedDType(), data, bytes);
      });
    }
  }
  return is_finite;
}

void TakeSnapshot(RankShare& share) {
  const std::size_t total = Summed<std::size_t>(share.stretches, [&](const StretchData& stretch) {
    return static_cast<std::size_t>(stretch.stretch.count * SizeOf(stretch.SavedDType()));
  });
  share.snapshot.resize(total);
  std::byte* out = share.snapshot.data();
  std::vector<std::byte> buffer;
  for (StretchData& stretch : share.stretches) {
    const std::byte* const begin = out;
    ForEachPiece(stretch, share.copy, buffer, [&](const std::byte* data, std::int64_t bytes) {
      std::memcpy(out, data, static_cast<std::size_t>(bytes));
      out += bytes;
    });
    stretch.dtype = stretch.SavedDType();
    stretch.saved_as.reset();
    stretch.data = begin;
  }
  share.copy = {};
}

void MakeCheckpointFolder(const std::string& folder) {
  (void)FollowLinks(folder);  // refuses another user's link
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw Cannot("create", folder, error.value());
  }
  CheckCheckpointFolder(folder);
}

void CheckCheckpointFolder(const std::string& folder) {
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    throw Cannot("write into", folder, errno);
  }
}

CheckpointWriter::CheckpointWriter(const std::string& folder, std::int64_t step)
    : number_(RandomNumber()) {
  final_ = CheckpointFolder(folder, step);
  temporary_ = UnfinishedFolder(folder, step, number_);
  if (::mkdir(temporary_.c_str(), 0777) != 0) {
    throw Cannot("create", temporary_, errno);
  }
}

CheckpointWriter::~CheckpointWriter() {
  if (!committed_) {
    std::error_code ignored;
    std::filesystem::remove_all(temporary_, ignored);
  }
}

std::string UnfinishedFolder(const std::string& folder, std::int64_t step, std::int64_t number) {
  const std::string name = kTemporaryPrefix + StepName(step) + "-" + std::to_string(number);
  return (std::filesystem::path(folder) / name).string();
}

std::string CheckpointFolder(const std::string& folder, std::int64_t step) {
  return (std::filesystem::path(folder) / StepName(step)).string();
}

SavedFile WriteRankFile(const std::string& unfinished, std::int64_t rank, const RankShare& share) {
  SavedFile saved;
  saved.name = RankFileName(rank);
  std::map<std::string, std::vector<const StretchData*>> by_name;
  for (const StretchData& stretch : share.stretches) {
    const SavedStretch& next = stretch.stretch;
    std::vector<const StretchData*>& parts = by_name[next.tensor];
    SavedStretch* const last = parts.empty() ? nullptr : &saved.stretches.back();
    SW_CHECK(
        last == nullptr || (last->tensor == next.tensor && last->begin + last->count <= next.begin),
        "stretches of " + next.tensor + " on one rank in another order");
    if (last != nullptr && last->begin + last->count == next.begin) {
      last->count += next.count;
    } else {
      saved.stretches.push_back(next);
    }
    parts.push_back(&stretch);
  }
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, parts] : by_name) {
    std::int64_t count = 0;
    for (const StretchData* const part : parts) {
      count += part->stretch.count;
    }
    entries.push_back({.name = name, .dtype = parts.front()->SavedDType(), .shape = {count}});
  }
  CheckpointFile out((std::filesystem::path(unfinished) / saved.name).string());
  std::vector<std::byte> buffer;
  for (const SafetensorsEntry& entry : WriteSafetensorsHeader(out, std::move(entries), {})) {
    for (const StretchData* const part : by_name.at(entry.name)) {
      ForEachPiece(*part, share.copy, buffer,
                   [&](const std::byte* data, std::int64_t bytes) { out.Write(data, bytes); });
    }
  }
  out.SyncAndClose();
  saved.bytes = out.size();
  saved.crc = out.crc();
  return saved;
}

void CheckpointWriter::WriteRank(std::int64_t rank, const RankShare& share) {
  Add(WriteRankFile(temporary_, rank, share));
}

void CheckpointWriter::Add(SavedFile file) {
  const std::lock_guard lock(mutex_);
  files_.push_back(std::move(file));
}

std::string CheckpointWriter::Commit(Manifest manifest) {
  SortBy(files_, &SavedFile::name);
  manifest.files = files_;
  const std::string text = ManifestJson(manifest);
  CheckpointFile out((std::filesystem::path(temporary_) / kManifestName).string());
  out.Write(text.data(), static_cast<std::int64_t>(text.size()));
  out.SyncAndClose();
  SyncFolder(temporary_);
  Replace(temporary_, final_);
  committed_ = true;
  SyncFolder(std::filesystem::path(final_).parent_path().string());
  return final_;
}

BackgroundWriter::~BackgroundWriter() {
  if (thread_.joinable()) {
    thread_.join();
  }
}

void BackgroundWriter::Start(std::function<void()> work) {
  Wait();
  thread_ = StartThread([this, work = std::move(work)] {
    try {
      work();
    } catch (...) {
      error_ = std::current_exception();
    }
  });
}

void BackgroundWriter::Wait() {
  if (thread_.joinable()) {
    thread_.join();
  }
  if (const std::exception_ptr error = std::exchange(error_, nullptr)) {
    std::rethrow_exception(error);
  }
}

void RemoveUnfinishedCheckpoints(const std::string& folder) {
  std::error_code ignored;
  for (const std::filesystem::path& path : EntriesOf(folder)) {
    if (path.filename().string().starts_with(kTemporaryPrefix)) {
      std::filesystem::remove_all(path, ignored);
    }
  }
}

std::optional<std::int64_t> StepIn(const std::string& checkpoint) {
  const std::filesystem::path path = std::filesystem::path(checkpoint).lexically_normal();
  const std::string name = (path.has_filename() ? path : path.parent_path()).filename().string();
  return name.starts_with(kStepPrefix) ? IntegerIn(name.substr(kStepPrefix.size())) : std::nullopt;
}

std::vector<std::string> FinishedCheckpoints(const std::string& folder) {
  std::vector<std::pair<std::int64_t, std::string>> found;  // by step
  for (const std::filesystem::path& path : EntriesOf(folder)) {
    const std::optional<std::int64_t> step = StepIn(path.string());
    if (step && Exists(path / kManifestName)) {
      found.emplace_back(*step, path.string());
    }
  }
  SortAll(found);
  std::vector<std::string> folders;
  folders.reserve(found.size());
  for (auto& [step, path] : found) {
    folders.push_back(std::move(path));
  }
  return folders;
}

namespace {

bool IsOfRun(const std::string& checkpoint, const std::string& run, std::int64_t last) {
  const std::string file = (std::filesystem::path(checkpoint) / kManifestName).string();
  try {
    const Manifest manifest = ParseManifest(ReadTextFile(file), file);
    return manifest.run == run && manifest.step <= last && manifest.step == StepIn(checkpoint);
  } catch (const InputError&) {
    return false;
  }
}

}  // namespace

void RemoveOldCheckpoints(const std::string& folder, std::int64_t keep, const std::string& run,
                          std::int64_t last) {
  SW_CHECK(keep >= 1, std::to_string(keep));
  std::vector<std::string> found = FinishedCheckpoints(folder);
  std::erase_if(found,
                [&](const std::string& checkpoint) { return !IsOfRun(checkpoint, run, last); });
  found.resize(found.size() - std::min(found.size(), static_cast<std::size_t>(keep)));
  // Under another name first: what a kill leaves of it is removed by the next run.
  std::error_code error;
  for (const std::filesystem::path old : found) {
    const std::filesystem::path aside =
        old.parent_path() /
        (kTemporaryPrefix + old.filename().string() + "-" + std::to_string(RandomNumber()));
    std::filesystem::rename(old, aside, error);
    std::filesystem::remove_all(aside, error);
  }
}

}  // namespace shardwright
