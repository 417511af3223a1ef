#include "executor/checkpoint/save.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "core/error.h"
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

}  // namespace

Snapshot::Snapshot(std::vector<StretchData> stretches, const MemoryCopy& copy)
    : stretches_(std::move(stretches)) {
  std::size_t total = 0;
  for (const StretchData& stretch : stretches_) {
    const DType dtype = stretch.saved_as.value_or(stretch.dtype);
    total += static_cast<std::size_t>(stretch.stretch.count * SizeOf(dtype));
  }
  bytes_.resize(total);
  std::byte* out = bytes_.data();
  for (StretchData& stretch : stretches_) {
    const DType from = std::exchange(stretch.dtype, stretch.saved_as.value_or(stretch.dtype));
    const auto size = static_cast<std::size_t>(stretch.stretch.count * SizeOf(stretch.dtype));
    if (stretch.dtype == from) {
      copy(out, stretch.data, static_cast<std::int64_t>(size));
    } else {
      const std::int64_t bytes = stretch.stretch.count * SizeOf(from);
      std::vector<std::byte> source(static_cast<std::size_t>(bytes));
      copy(source.data(), stretch.data, bytes);
      for (std::int64_t i = 0; i < stretch.stretch.count; ++i) {
        StoreFloat(stretch.dtype, out, i, LoadFloat(from, source.data(), i));
      }
    }
    stretch.data = out;
    out += size;
  }
  std::vector<StretchData> whole;
  for (StretchData& stretch : stretches_) {
    SavedStretch* const last = whole.empty() ? nullptr : &whole.back().stretch;
    if (last != nullptr && last->tensor == stretch.stretch.tensor &&
        last->begin + last->count == stretch.stretch.begin) {
      last->count += stretch.stretch.count;
    } else {
      whole.push_back(std::move(stretch));
    }
  }
  stretches_ = std::move(whole);
}

void MakeCheckpointFolder(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    throw Cannot("create", folder, error.value());
  }
  if (::access(folder.c_str(), W_OK) != 0) {
    throw Cannot("write into", folder, errno);
  }
}

CheckpointWriter::CheckpointWriter(const std::string& folder, std::int64_t step) {
  const std::filesystem::path base(folder);
  final_ = (base / StepName(step)).string();
  temporary_ = UnfinishedFolder(folder, step, ::getpid());
  MakeCheckpointFolder(folder);
  std::error_code error;
  std::filesystem::remove_all(temporary_, error);
  if (!std::filesystem::create_directory(temporary_, error)) {
    throw Cannot("create", temporary_, error.value());
  }
}

CheckpointWriter::~CheckpointWriter() {
  if (!committed_) {
    std::error_code ignored;
    std::filesystem::remove_all(temporary_, ignored);
  }
}

std::string UnfinishedFolder(const std::string& folder, std::int64_t step, std::int64_t writer) {
  const std::string name = kTemporaryPrefix + StepName(step) + "-" + std::to_string(writer);
  return (std::filesystem::path(folder) / name).string();
}

SavedFile WriteRankFile(const std::string& unfinished, std::int64_t rank,
                        const std::vector<StretchData>& stretches) {
  SavedFile saved;
  saved.name = RankFileName(rank);
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, const StretchData*> by_name;
  for (const StretchData& stretch : stretches) {
    entries.push_back(
        {.name = stretch.stretch.tensor, .dtype = stretch.dtype, .shape = {stretch.stretch.count}});
    const bool is_new = by_name.emplace(stretch.stretch.tensor, &stretch).second;
    SW_CHECK(is_new, "two stretches of " + stretch.stretch.tensor + " on one rank");
    saved.stretches.push_back(stretch.stretch);
  }
  OutputFile out((std::filesystem::path(unfinished) / saved.name).string());
  for (const SafetensorsEntry& entry : WriteSafetensorsHeader(out, std::move(entries), {})) {
    out.Write(by_name.at(entry.name)->data, entry.end - entry.begin);
  }
  out.SyncAndClose();
  saved.bytes = out.size();
  saved.crc = out.crc();
  return saved;
}

void CheckpointWriter::WriteRank(std::int64_t rank, const std::vector<StretchData>& stretches) {
  Add(WriteRankFile(temporary_, rank, stretches));
}

void CheckpointWriter::Add(SavedFile file) {
  const std::lock_guard lock(mutex_);
  files_.push_back(std::move(file));
}

std::string CheckpointWriter::Commit(Manifest manifest) {
  std::sort(files_.begin(), files_.end(),
            [](const SavedFile& a, const SavedFile& b) { return a.name < b.name; });
  manifest.files = files_;
  const std::string text = ManifestJson(manifest);
  OutputFile out((std::filesystem::path(temporary_) / kManifestName).string());
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
  thread_ = std::thread([this, work = std::move(work)] {
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
  std::error_code error;
  std::vector<std::filesystem::path> found;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().filename().string().starts_with(kTemporaryPrefix)) {
      found.push_back(entry.path());
    }
  }
  for (const std::filesystem::path& path : found) {
    std::filesystem::remove_all(path, error);
  }
}

std::vector<std::string> FinishedCheckpoints(const std::string& folder) {
  std::error_code error;
  std::vector<std::pair<std::uint64_t, std::string>> found;  // by step
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kStepPrefix)) {
      continue;
    }
    std::uint64_t step = 0;
    const char* const name_end = name.data() + name.size();
    const auto [end, problem] = std::from_chars(name.data() + kStepPrefix.size(), name_end, step);
    if (problem == std::errc() && end == name_end &&
        std::filesystem::exists(entry.path() / kManifestName, error)) {
      found.emplace_back(step, entry.path().string());
    }
  }
  std::sort(found.begin(), found.end());
  std::vector<std::string> folders;
  for (auto& [step, path] : found) {
    folders.push_back(std::move(path));
  }
  return folders;
}

void RemoveOldCheckpoints(const std::string& folder, std::int64_t keep) {
  SW_CHECK(keep >= 1, std::to_string(keep));
  std::vector<std::string> found = FinishedCheckpoints(folder);
  found.resize(found.size() - std::min(found.size(), static_cast<std::size_t>(keep)));
  std::error_code ignored;
  for (const std::string& old : found) {
    std::filesystem::remove_all(old, ignored);
  }
}

}  // namespace shardwright
