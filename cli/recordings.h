#pragma once

#include <string>
#include <vector>

#include "traces/recording.h"

namespace shardwright {

// `names` with each folder replaced by the files in it that are called as traces are (.json,
// .json.gz, .sqlite), by name. Throws InputError for a folder without any.
[[nodiscard]] std::vector<std::string> TraceFilesOf(const std::vector<std::string>& names);

// Recordings of PyTorch's profiler or Nsight Systems, one file each, read on all cores;
// says on standard error how far it is. Throws InputError for other kinds of files and for two of
// one rank.
[[nodiscard]] std::vector<ProfilerRecording> ReadRecordings(const std::vector<std::string>& files);

// One file, whose kind is known to be one of these.
[[nodiscard]] ProfilerRecording ReadRecording(const std::string& file);

}  // namespace shardwright
