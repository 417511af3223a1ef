#pragma once

// Time of kernels on one GPU, running alone. docs/cost_model.md, section "Kernels".
//
// kernels.cc has examples of tiles and of ranks with unequal speed.

#include <array>
#include <cstdint>

#include "core/units.h"
#include "models/kernel_set.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

// Of one library (AttentionProfile).
struct AttentionRates {
  std::array<FlopsPerSecond, kMathTypeCount> forward{};
  std::array<FlopsPerSecond, kMathTypeCount> backward{};
  double softmax = 0;
  double start = 0;
  double group = 0;
  double wide = 0;
};

// Rates that kernels can reach on one GPU: the numbers of GpuSpec times the fractions of
// ComputeProfile.
struct KernelRates {
  std::array<FlopsPerSecond, kMathTypeCount> gemm{};            // 0: no such unit
  std::array<AttentionRates, kAttentionImplCount> attention{};  // by AttentionImpl
  double fp8_rowwise = 1;  // of gemm, for operands with a scale per row
  std::array<FlopsPerSecond, kMathTypeCount> own_grouped{};  // as gemm where there is no number
  BytesPerSecond elementwise;
  BytesPerSecond copies;
  BytesPerSecond rows;
  BytesPerSecond gather;
  BytesPerSecond reduction;
  BytesPerSecond optimizer;
  BytesPerSecond grad_norm, grad_clip;
  BytesPerSecond gemm_memory;  // of matrix products that move more than they multiply
  BytesPerSecond operands;     // of matrix products; 0: brought while others are multiplied
  BytesPerSecond streaming;    // the fastest of plain kernels
  Seconds gemm_ramp;
  Seconds floor;
  Seconds gap;
  Seconds qr_column;
  Seconds load;
  double grouped_overlap = 1;
  Seconds grouped_call;
  Bytes cache{0};  // the GPU's last level; 0: not known
  std::int64_t sm_count = 1;
  bool has_wide_cudnn_gradients = false;
};
// Whose kernel runs attention on a GPU: the executor's own where the library has no plan.
[[nodiscard]] AttentionImpl AttentionOn(const Kernel& kernel, bool has_wide_cudnn_gradients);
// Does ComputeProfile::own_grouped say how fast such products are? It was measured in 16 bits.
[[nodiscard]] bool IsOwnGroupedKnown(const ComputeProfile& profile, MathType type);
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

// The same for `batch` products of (m, n) each, which wait for no wave of their own: what is padded
// to tiles of 128 x 128.
[[nodiscard]] double PaddingOverhead(std::int64_t m, std::int64_t n);

// Bytes of a kernel that goes through rows: what it reads again crosses the memory bus where the
// rows that are worked on at a time do not stay in the cache. 0 bytes of cache: it is not known.
[[nodiscard]] Bytes RowTraffic(const Kernel& kernel, Bytes cache, std::int64_t sm_count);

// The numbers of the library that runs fused attention: the usual one's where a profile does not
// know it.
[[nodiscard]] const AttentionProfile& AttentionOf(const ComputeProfile& profile,
                                                  AttentionImpl attention);
[[nodiscard]] AttentionProfile& AttentionOf(ComputeProfile& profile, AttentionImpl attention);

// How many times longer a fused attention kernel takes than its operations alone say, at the rate
// of large problems of head dimension 128. Query tiles of 128 are divided among the
// multiprocessors, and whoever takes the last one is that much later (the bound of list scheduling,
// R. L. Graham, 1969). A tile takes as long as the keys it sees, `start` keys more, and where keys
// are masked half a tile's more; of each key, a share `softmax` does not grow with the head
// dimension. 1 where `start` is 0. Where `group` is not 0, long tiles begin first: the longest one
// or an equal share of all is what takes longest, with that many queries to a tile in forward.
[[nodiscard]] double AttentionOverhead(const Kernel& kernel, double softmax, double start,
                                       std::int64_t sm_count, double group = 0);

}  // namespace shardwright
