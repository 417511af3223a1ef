#pragma once

// How kernels see memory of any floating-point dtype: as fp32 numbers, in place where it is fp32
// and through a buffer otherwise.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/units.h"
#include "executor/model_op.h"

namespace shardwright {

// Element-wise kernels work through their operands in chunks of this many elements, with a buffer
// per operand on the stack.
inline constexpr std::int64_t kChunk = 1024;
struct ChunkBuffer {
  alignas(64) std::array<float, kChunk> values;
};

// Copies with a cast; rounds to nearest even.
void LoadFloats(const ConstView& from, std::int64_t offset, std::int64_t n, float* to);
void StoreFloats(const float* from, std::int64_t n, const View& to, std::int64_t offset);
// Adds to what is there; 16-bit sums are rounded once.
void AddFloats(const float* from, std::int64_t n, const View& to, std::int64_t offset);

[[nodiscard]] float ReadOne(const ConstView& from, std::int64_t i);

// `n` elements from `offset` on as fp32: the memory itself, or a copy in `buffer` (of at least n).
[[nodiscard]] const float* ReadFloats(const ConstView& from, std::int64_t offset, std::int64_t n,
                                      float* buffer);
// Where to put n results for `to`: its memory itself, or `buffer`. FinishFloats then stores them.
[[nodiscard]] float* ResultFloats(const View& to, std::int64_t offset, float* buffer);
void FinishFloats(const float* values, std::int64_t n, const View& to, std::int64_t offset);

[[nodiscard]] inline ConstView AsConst(const View& view) {
  return {view.data, view.dtype, view.elements};
}

// Stores a gradient that was computed in fp32.
void StoreParamGrad(const float* values, std::int64_t n, const ParamGrad& to, std::int64_t offset);

// Hands out pieces of a workspace. Each begins at a multiple of 64 bytes.
class Scratch {
 public:
  explicit Scratch(std::span<std::byte> memory) : memory_(memory) {}

  // Content is arbitrary. Aborts when the workspace that was declared is too small: our bug.
  [[nodiscard]] float* Floats(std::int64_t n);
  [[nodiscard]] std::int64_t* Integers(std::int64_t n);
  // The matrix products' part.
  [[nodiscard]] std::span<std::byte> Take(std::int64_t bytes);

 private:
  std::span<std::byte> memory_;
  std::size_t used_ = 0;
};

// Calls f(begin, count) for chunks of n elements.
template <class F>
void ForEachChunk(std::int64_t n, const F& f) {
  for (std::int64_t begin = 0; begin < n; begin += kChunk) {
    f(begin, n - begin < kChunk ? n - begin : kChunk);
  }
}

}  // namespace shardwright
