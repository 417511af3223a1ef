#include "cli/recordings.h"

#include <map>

#include "core/error.h"
#include "traces/kineto.h"
#include "traces/measured_file.h"
#include "traces/nsight.h"

namespace shardwright {

ProfilerRecording ReadRecording(const std::string& file) {
  const MeasuredKind kind = DetectMeasured(file);
  if (kind != MeasuredKind::kKineto && kind != MeasuredKind::kNsight) {
    throw InputError(file, "a file of kind " + std::string(NameOf(kind)),
                     "a trace of PyTorch's profiler, or an export of Nsight Systems");
  }
  return kind == MeasuredKind::kKineto ? ReadKineto(file) : ReadNsight(file);
}

std::vector<ProfilerRecording> ReadRecordings(const std::vector<std::string>& files) {
  std::vector<ProfilerRecording> recordings;
  std::map<std::int64_t, std::string> ranks;
  for (const std::string& file : files) {
    recordings.push_back(ReadRecording(file));
    const auto [first, is_new] = ranks.emplace(recordings.back().rank, file);
    if (!is_new) {
      throw InputError(
          file, "rank " + std::to_string(recordings.back().rank) + ", as " + first->second + " has",
          "one file per rank");
    }
  }
  return recordings;
}

}  // namespace shardwright
