#pragma once

#include <string>
#include <vector>

#include "traces/recording.h"

namespace shardwright {

// Recordings of PyTorch's profiler or Nsight Systems, one file each. Throws InputError for other
// kinds of files and for two of one rank.
[[nodiscard]] std::vector<ProfilerRecording> ReadRecordings(const std::vector<std::string>& files);

// One file, whose kind is known to be one of these.
[[nodiscard]] ProfilerRecording ReadRecording(const std::string& file);

}  // namespace shardwright
