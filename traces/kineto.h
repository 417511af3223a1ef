#pragma once

// Reads traces of PyTorch's profiler (Kineto), plain or gzip.

#include <string>

#include "traces/recording.h"

namespace shardwright {

// The recording of one rank. Streams: memory grows with the kernels, launches, ops and marks that
// are kept (some 40 bytes each), not with the file. Throws InputError for damaged files, wrong
// types of the fields that count, and traces without any work.
[[nodiscard]] ProfilerRecording ReadKineto(const std::string& file);

}  // namespace shardwright
