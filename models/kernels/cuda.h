#pragma once

// Sizes that the CUDA device's kernels (executor/cuda) and the lowering of their kernel set
// (models/kernels/cuda.cc) agree on.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string_view>

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

// What cuDNN may use for attention beside what our own kernels take, 0 where it is not asked.
// Forward is descriptors. Its gradients repeat bit by bit only where the gradients of all scores
// lie in memory, in 16 bits, in whole tiles; grouped heads keep those of k and v of every query
// head as well. More than kMostScores is left to our own kernels, which keep none and are slower
// by far. Taken from what version 9.19 says for sm_80 and sm_90 (cudnn_library_test.cc compares).
inline constexpr std::int64_t kMostScores = std::int64_t{8} << 30;  // bytes
inline constexpr std::int64_t kCudnnDescriptors = 4096;
[[nodiscard]] constexpr bool MayUseCudnn(const OpSpec& spec, DType compute) {
  return SizeOf(compute) == 2 && !spec.has_bias && spec.window == 0 && spec.soft_cap == 0.0 &&
         spec.dropout_p == 0.0 && spec.alibi_max == 0.0 && spec.head_dim % 8 == 0 &&
         spec.value_dim % 8 == 0 && spec.head_dim <= 256 && spec.value_dim <= 256;
}
// Gradients of wider heads have plans for compute capability 9.0 alone, whatever the sequence
// (cudnn_library_test.cc asks for them on each architecture).
inline constexpr std::int64_t kWidestCudnnGradient = 128;
[[nodiscard]] constexpr bool HasWideCudnnGradients(std::string_view architecture) {
  return architecture == "hopper";
}
[[nodiscard]] constexpr std::int64_t CudnnAttentionGradWorkspace(const OpSpec& spec,
                                                                 std::int64_t batch) {
  const std::int64_t rows = batch * spec.heads;
  const std::int64_t scores = 2 * rows * RoundUp(spec.seq_q, 64) * RoundUp(spec.seq_k, 128);
  const std::int64_t shared = spec.heads == spec.kv_heads ? 0 : spec.head_dim + spec.value_dim;
  const std::int64_t grouped = 2 * rows * spec.seq_k * shared;
  return scores > kMostScores ? 0 : scores + grouped + kCudnnDescriptors;
}

// What cuDNN may use for a convolution in 16 bits. Its fast engines that repeat bit by bit want
// channels last and in eights: they copy images and weights into that layout and out of it. Weight
// gradients may be summed in parts, which lie beside the copies. Compared as above.
inline constexpr std::int64_t kCudnnParts = std::int64_t{24} << 20;
[[nodiscard]] constexpr std::int64_t CudnnConvolutionWorkspace(const OpSpec& spec,
                                                               std::int64_t batch,
                                                               bool is_backward) {
  constexpr std::int64_t kEights = 8;
  const std::int64_t out = RoundUp(spec.out, kEights);
  const std::int64_t x = batch * RoundUp(spec.in, kEights) * spec.height * spec.width;
  const std::int64_t y = batch * out * spec.height_out * spec.width_out;
  const std::int64_t w = out * RoundUp(spec.in / spec.groups, kEights) * spec.kernel * spec.kernel;
  const std::int64_t copies = 2 * (x + y + w);
  return std::max(kLibraryWorkspace, copies + (is_backward ? kCudnnParts : kCudnnDescriptors));
}

// Sums over rows are made of this many partial sums.
[[nodiscard]] constexpr std::int64_t SumChunks(std::int64_t rows) {
  return std::clamp<std::int64_t>(CeilDiv(rows, 64), 1, 64);
}

// One matrix of an fp8 product, `lines` of `length` elements that are summed over: its copy, what
// divides by its scales, and the largest magnitudes in parts. With one scale at most kFp8Maxima
// blocks look for them; lines that lie across the rows of memory are looked through in chunks.
inline constexpr std::int64_t kFp8Maxima = 512;
[[nodiscard]] constexpr std::int64_t CudaFp8Copy(std::int64_t lines, std::int64_t length,
                                                 bool by_row, bool lies_across) {
  const std::int64_t parts = !by_row ? kFp8Maxima : lies_across ? SumChunks(length) * lines : 0;
  return CudaPieces({lines * length, 4 * (by_row ? lines : 1), 4 * parts});
}

// Losses are summed by blocks of this many rows.
inline constexpr std::int64_t kLossRows = 256;
[[nodiscard]] constexpr std::int64_t LossWorkspace(std::int64_t rows) {
  constexpr std::int64_t kDouble = 8;
  return CudaPieces({2 * kDouble * CeilDiv(rows, kLossRows), kDouble});
}
// Chunks of rows that are summed apart: the blocks of all chunks, or of all rows, which are fewer.
[[nodiscard]] constexpr std::int64_t LossChunkBlocks(std::int64_t rows, std::int64_t chunk) {
  return rows / chunk * CeilDiv(chunk, kLossRows) + CeilDiv(rows % chunk, kLossRows);
}
[[nodiscard]] constexpr std::int64_t LossChunksWorkspace(std::int64_t rows, std::int64_t chunk) {
  return LossWorkspace(kLossRows * LossChunkBlocks(rows, chunk));
}

}  // namespace shardwright
