#include "cli/recordings.h"

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <string_view>

#include "core/error.h"
#include "core/files.h"
#include "core/parallel.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "traces/kineto.h"
#include "traces/measured_file.h"
#include "traces/nsight.h"

namespace shardwright {
namespace {

// Says every few seconds how many files have been read.
class ReadingTeller {
 public:
  explicit ReadingTeller(std::size_t count) : count_(count) {}

  void TellOneMore() {
    constexpr std::chrono::seconds kPause(2);
    const std::lock_guard lock(mutex_);
    ++read_;
    const auto now = std::chrono::steady_clock::now();
    if (now - told_ >= kPause) {
      Say("read " + std::to_string(read_) + " of " + std::to_string(count_) + " traces");
      told_ = now;
    }
  }

 private:
  const std::size_t count_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point told_ = std::chrono::steady_clock::now();
  std::size_t read_ = 0;
};

bool IsTraceName(std::string_view name) {
  constexpr std::array<std::string_view, 3> kEnds = {".json", ".json.gz", ".sqlite"};
  return !name.starts_with('.') && AnyOf(kEnds, [&](auto end) { return name.ends_with(end); });
}

std::vector<std::string> TracesIn(const std::string& folder) {
  std::vector<std::string> files;
  for (const auto& file : EntriesOf(folder, "a folder of traces")) {
    if (IsTraceName(file.filename().string()) && IsRegularFile(file)) {
      files.push_back(file.string());
    }
  }
  if (files.empty()) {
    throw InputError(folder, "a folder without traces",
                     "files that end in .json, .json.gz or .sqlite");
  }
  return files;
}

}  // namespace

std::vector<std::string> TraceFilesOf(const std::vector<std::string>& names) {
  std::vector<std::string> files;
  for (const std::string& name : names) {
    if (!IsFolder(name)) {
      files.push_back(name);
      continue;
    }
    const std::vector<std::string> inside = TracesIn(name);
    files.insert(files.end(), inside.begin(), inside.end());
  }
  return files;
}

ProfilerRecording ReadRecording(const std::string& file) {
  const MeasuredKind kind = DetectMeasured(file);
  switch (kind) {
    case MeasuredKind::kKineto:
      return ReadKineto(file);
    case MeasuredKind::kNsight:
      return ReadNsight(file);
    default:
      throw InputError(file, "a file of kind " + std::string(NameOf(kind)),
                       "a trace of PyTorch's profiler or an export of Nsight Systems");
  }
}

std::vector<ProfilerRecording> ReadRecordings(const std::vector<std::string>& files) {
  std::vector<ProfilerRecording> recordings(files.size());
  ReadingTeller teller(files.size());
  ParallelFor(files.size(), ThreadCount(), [&](std::size_t i, std::size_t) {
    recordings[i] = ReadRecording(files[i]);
    teller.TellOneMore();
  });
  std::map<std::int64_t, std::string> ranks;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const auto [first, is_new] = ranks.emplace(recordings[i].rank, files[i]);
    if (!is_new) {
      throw InputError(
          files[i], "rank " + std::to_string(recordings[i].rank) + ", as " + first->second + " has",
          "one file per rank");
    }
  }
  return recordings;
}

}  // namespace shardwright
