#pragma once

// Sizes that the executor's host kernels (executor/host/kernels) and the lowering of their kernel
// set (models/kernels/host.cc) agree on: what one call of a kernel may use beside its operands.

#include <algorithm>
#include <cstdint>

#include "core/units.h"
#include "models/model.h"

namespace shardwright {

// Every piece of a workspace begins at a multiple of 64 bytes.
[[nodiscard]] constexpr std::int64_t HostAligned(std::int64_t bytes) {
  return RoundUp(bytes, 64);
}

// Blocks of the matrix product: operands that are not fp32, or whose elements lie apart, are copied
// into contiguous fp32 panels of at most (M, K) and (K, N) numbers, and 16-bit results are summed
// in an fp32 tile of at most (M, N).
inline constexpr std::int64_t kGemmBlockM = 384;
inline constexpr std::int64_t kGemmBlockN = 512;
inline constexpr std::int64_t kGemmBlockK = 256;

// Bytes of workspace of one matrix product (m, k) x (k, n) with a result of type `result`.
[[nodiscard]] constexpr std::int64_t HostGemmWorkspace(std::int64_t m, std::int64_t n,
                                                       std::int64_t k, DType result) {
  const std::int64_t rows = std::min(kGemmBlockM, m);
  const std::int64_t columns = std::min(kGemmBlockN, n);
  const std::int64_t depth = std::min(kGemmBlockK, k);
  const std::int64_t tile = result == DType::kFp32 ? 0 : rows * columns;
  return HostAligned(rows * depth * 4) + HostAligned(columns * depth * 4) + HostAligned(tile * 4);
}

// Scales of the operands of a product in fp8: one each, or one per row of a and column of b.
[[nodiscard]] constexpr std::int64_t HostFp8Scales(std::int64_t m, std::int64_t n, bool by_row) {
  return HostAligned(4 * (by_row ? m : 1)) + HostAligned(4 * (by_row ? n : 1));
}

// Attention works on tiles of at most this many queries and keys.
inline constexpr std::int64_t kAttentionQueries = 128;
inline constexpr std::int64_t kAttentionKeys = 256;

// Sizes of an attention's tiles and of its matrix products together.
struct HostAttentionTiles {
  std::int64_t queries = 0, keys = 0;
  std::int64_t gemm_bytes = 0;
};
[[nodiscard]] constexpr HostAttentionTiles AttentionTilesOf(const OpSpec& spec) {
  const std::int64_t q = std::min(spec.seq_q, kAttentionQueries);
  const std::int64_t k = std::min(spec.seq_k, kAttentionKeys);
  const std::int64_t features = std::max(spec.head_dim, spec.value_dim);
  return {q, k,
          HostGemmWorkspace(std::max(q, k), std::max(k, features), std::max({q, k, features}),
                            DType::kFp32)};
}

// A convolution unfolds its input for at most this many output pixels at a time.
inline constexpr std::int64_t kConvPixels = 512;

// Sizes of a convolution as matrix products, per group: weights are (channels_out, taps).
struct HostConvSizes {
  std::int64_t channels_in = 0, channels_out = 0;
  std::int64_t taps = 0;       // channels_in * kernel * kernel
  std::int64_t pixels_in = 0;  // of one channel
  std::int64_t pixels_out = 0;
  std::int64_t pixels = 0;  // unfolded at a time
  bool unfolds = true;      // false: the input is its own unfolding (1 x 1, stride 1)
};
[[nodiscard]] constexpr HostConvSizes ConvSizesOf(const OpSpec& spec) {
  HostConvSizes s;
  s.channels_in = spec.in / spec.groups;
  s.channels_out = spec.out / spec.groups;
  s.taps = s.channels_in * spec.kernel * spec.kernel;
  s.pixels_in = spec.height * spec.width;
  s.pixels_out = spec.height_out * spec.width_out;
  s.pixels = std::min(s.pixels_out, kConvPixels);
  s.unfolds = spec.kernel != 1 || spec.stride != 1 || spec.padding != 0;
  return s;
}

// Images of a convolution that are worth a thread.
[[nodiscard]] constexpr std::int64_t LeastConvImages(const HostConvSizes& sizes) {
  constexpr std::int64_t kLeastProducts = std::int64_t{1} << 20;
  return 1 + kLeastProducts / (sizes.channels_out * sizes.pixels_out * sizes.taps);
}

// Routed rows of the experts together, at most.
[[nodiscard]] constexpr std::int64_t RoutedRows(const OpSpec& spec, std::int64_t rows,
                                                bool is_dense) {
  return rows * (is_dense ? spec.experts : spec.experts_per_token);
}

// The largest matrix product of the experts, when one expert has all rows.
[[nodiscard]] constexpr std::int64_t ExpertsGemmWorkspace(const OpSpec& spec, std::int64_t rows) {
  const DType rounded = DType::kBf16;
  return std::max({HostGemmWorkspace(rows, spec.out, spec.in, rounded),
                   HostGemmWorkspace(rows, spec.in, spec.out, rounded),
                   HostGemmWorkspace(spec.out, spec.in, rows, rounded),
                   HostGemmWorkspace(spec.in, spec.out, rows, rounded)});
}

// A linear layer that runs the loss behind it: rows of each chunk but the last, which may be
// shorter. Requires rows >= 1 and chunks >= 1.
[[nodiscard]] constexpr std::int64_t LossChunkRows(std::int64_t rows, std::int64_t chunks) {
  return CeilDiv(rows, std::min(chunks, rows));
}

}  // namespace shardwright
