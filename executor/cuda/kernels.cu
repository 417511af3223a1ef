// The kernels' entry points on a GPU.

#include <array>
#include <cstddef>

#include <cuda_runtime_api.h>

#include "executor/cuda/entries.h"
#include "executor/cuda/kernels/kernels.h"

namespace shardwright {
namespace {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads)
    Entry(const __grid_constant__ typename Kernel::Args args) {
  extern __shared__ __align__(128) std::byte shared[];
  gpu::Block block(shared);
  Kernel::Run(block, args);
}

}  // namespace

const void* KernelEntry(gpu::KernelId kernel) {
  static const std::array<const void*, static_cast<std::size_t>(gpu::KernelId::kCount)> entries = {
#define SW_ENTRY(name) reinterpret_cast<const void*>(&Entry<gpu::name##Kernel>),
      SW_KERNELS(SW_ENTRY)
#undef SW_ENTRY
  };
  return entries[static_cast<std::size_t>(kernel)];
}

}  // namespace shardwright
