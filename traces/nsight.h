#pragma once

#include <string>

#include "traces/recording.h"

namespace shardwright {

// Reads an export of Nsight Systems (nsys export --type sqlite). Units, phases and steps come from
// NVTX ranges with the names that PyTorch's profiler uses (torch.autograd.profiler.emit_nvtx, or a
// push and pop with these names). Kernels carry no sizes of collectives. Throws InputError for
// damaged files and for exports without kernels, naming the tables that are missing.
[[nodiscard]] ProfilerRecording ReadNsight(const std::string& file);

}  // namespace shardwright
