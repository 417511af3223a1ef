#pragma once

// Sizes that the CUDA device's kernels (executor/cuda) and the lowering of their kernel set
// (models/kernels/cuda.cc) agree on.

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/units.h"
#include "models/kernels/host.h"
#include "models/model.h"

namespace shardwright {

// Every piece of a workspace begins at a multiple of 256 bytes.
[[nodiscard]] constexpr std::int64_t CudaAligned(std::int64_t bytes) {
  return RoundUp(bytes, 256);
}
[[nodiscard]] constexpr std::int64_t CudaPieces(std::initializer_list<std::int64_t> bytes) {
  std::int64_t sum = 0;
  for (const std::int64_t piece : bytes) {
    sum += CudaAligned(piece);
  }
  return sum;
}

// What cuBLASLt may use for one product: NVIDIA recommends 32 MiB on Hopper for full speed
// (docs.nvidia.com/cuda/cublas, "cublasSetWorkspace"); small products get none.
inline constexpr std::int64_t kLibraryWorkspace = std::int64_t{32} << 20;
[[nodiscard]] constexpr std::int64_t CudaGemmWorkspace(std::int64_t m, std::int64_t n,
                                                       std::int64_t k) {
  constexpr double kSmall = 1 << 28;
  const double products = static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  return products < kSmall ? 0 : kLibraryWorkspace;
}

// Sums over rows are made of this many partial sums.
[[nodiscard]] constexpr std::int64_t SumChunks(std::int64_t rows) {
  return std::clamp<std::int64_t>(CeilDiv(rows, 64), 1, 64);
}

// Losses are summed by blocks of this many rows.
inline constexpr std::int64_t kLossRows = 256;
[[nodiscard]] constexpr std::int64_t LossWorkspace(std::int64_t rows) {
  return CudaPieces({2 * 8 * CeilDiv(rows, kLossRows), 8});
}

}  // namespace shardwright
