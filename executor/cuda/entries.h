#pragma once

#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright {

// The function that cudaLaunchKernel takes for this kernel; its one argument is the kernel's Args.
[[nodiscard]] const void* KernelEntry(gpu::KernelId kernel);

}  // namespace shardwright
