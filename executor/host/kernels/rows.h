#pragma once

// How kernels see memory of any floating-point dtype: as fp32 numbers, in place where it is fp32
// and through a buffer otherwise.

#include <algorithm>
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

void ZeroFill(const View& view);

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
  // What nobody has taken.
  [[nodiscard]] std::span<std::byte> Rest() const { return memory_.subspan(used_); }

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

// Fewer elements are not worth a thread of their own.
inline constexpr std::int64_t kLeastChunks = 32;
inline constexpr std::int64_t kLeastElements = kLeastChunks * kChunk;

// Calls f(begin, end, worker) for parts of [0, n), at least `least` each, which the team's threads
// share. What f does for one element may not depend on the part that it is in.
template <class F>
void ForEachPart(Team* team, std::int64_t n, std::int64_t least, const F& f) {
  const std::int64_t threads = team == nullptr ? 1 : static_cast<std::int64_t>(team->threads());
  const std::int64_t parts =
      std::clamp<std::int64_t>(n / std::max<std::int64_t>(least, 1), 1, threads);
  if (team == nullptr || parts == 1) {
    f(std::int64_t{0}, n, std::size_t{0});
    return;
  }
  team->For(static_cast<std::size_t>(parts), [&](std::size_t i, std::size_t worker) {
    const auto part = static_cast<std::int64_t>(i);
    f(part * n / parts, (part + 1) * n / parts, worker);
  });
}

// The chunks of `rows` rows of n elements, f(row, begin, count), shared as above.
template <class F>
void ForEachRowChunk(Team* team, std::int64_t rows, std::int64_t n, const F& f) {
  const std::int64_t per_row = (n + kChunk - 1) / kChunk;
  const std::int64_t least = std::max<std::int64_t>(1, kLeastElements / std::min(n, kChunk));
  ForEachPart(team, rows * per_row, least, [&](std::int64_t first, std::int64_t last, std::size_t) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t begin = i % per_row * kChunk;
      f(i / per_row, begin, std::min(kChunk, n - begin));
    }
  });
}
template <class F>
void ForEachChunk(Team* team, std::int64_t n, const F& f) {
  ForEachRowChunk(team, 1, n, [&](std::int64_t /*row*/, std::int64_t begin, std::int64_t count) {
    f(begin, count);
  });
}

// Rows of n elements that are worth a thread.
[[nodiscard]] inline std::int64_t LeastRows(std::int64_t n) {
  return std::max<std::int64_t>(1, kLeastElements / n);
}

// Of a matrix that threads share by columns: part of a row that is read in one go.
inline constexpr std::int64_t kLeastColumns = 64;

// The workspace of one of the threads that share a call.
[[nodiscard]] inline std::span<std::byte> WorkspaceOf(const ModelOpCall& call, std::size_t worker) {
  return worker == 0 ? call.workspace : call.team->Memory(worker, call.workspace.size());
}

}  // namespace shardwright
