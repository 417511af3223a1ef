// The kernels' entry points on a GPU.
// Each kernel of kernels/ becomes one __global__ function; its arguments are passed by value.
//
// Example: RowNormKernel wants 4 blocks of 256 threads on a multiprocessor with 65,536 registers,
// so the compiler may use 64 for each thread.

#include <array>
#include <cstddef>

#include <cuda_runtime_api.h>

#include "executor/cuda/entries.h"
#include "executor/cuda/kernels/kernels.h"

namespace shardwright {
namespace {

// Blocks of a multiprocessor at once that registers must suffice for, where a kernel says so: the
// more threads, the more loads under way.
template <class Kernel>
constexpr int MinBlocks() {
  if constexpr (requires { Kernel::kMinBlocks; }) {
    return Kernel::kMinBlocks;
  }
  return 1;
}

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, MinBlocks<Kernel>())
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
