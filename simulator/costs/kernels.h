#pragma once

// Time of kernels on one GPU, running alone. docs/cost_model.md, section "Kernels".

#include <array>
#include <cstdint>
#include <span>

#include "core/units.h"
#include "models/kernel_set.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

// What kernels can reach on one GPU: the numbers of GpuSpec times the fractions of ComputeProfile.
struct KernelRates {
  std::array<FlopsPerSecond, kMathTypeCount> gemm{};  // 0: no such unit
  std::array<FlopsPerSecond, kMathTypeCount> attention_forward{};
  std::array<FlopsPerSecond, kMathTypeCount> attention_backward{};
  BytesPerSecond elementwise;
  BytesPerSecond reduction;
  BytesPerSecond optimizer;
  BytesPerSecond grad_norm, grad_clip;
  Seconds gemm_ramp;
  Seconds floor;
  Seconds gap;
  Seconds qr_column;
  std::int64_t sm_count = 1;
};
// `ranks` GPUs work together, and the rates of matrix products and attention are those of the
// slowest of them.
[[nodiscard]] KernelRates FindKernelRates(const GpuSpec& gpu, const ComputeProfile& profile,
                                          std::int64_t ranks = 1);

// Time of one kernel without the gap to the next one. Never falls when a rate rises. Throws
// InputError when the GPU cannot multiply the kernel's dtype, not even as fp32.
[[nodiscard]] Seconds KernelTime(const Kernel& kernel, const KernelRates& rates);

// How many times longer a matrix product of batch x (m, n) takes than its operations alone say,
// because the multiprocessors compute whole tiles, one each, in waves: >= 1.
[[nodiscard]] double TileOverhead(std::int64_t batch, std::int64_t m, std::int64_t n,
                                  std::int64_t sm_count);

}  // namespace shardwright
