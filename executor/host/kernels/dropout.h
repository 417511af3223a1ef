#pragma once

// Dropout masks from a counter-based generator: a mask is a function of (seed, step, op, sample,
// element) and of nothing else. Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC 2011.

#include <array>
#include <cstdint>

#include "executor/model_op.h"

namespace shardwright {

// The generator itself: ten rounds over one counter.
[[nodiscard]] std::array<std::uint32_t, 4> Philox(std::array<std::uint32_t, 4> counter,
                                                  std::array<std::uint32_t, 2> key);

// Elements [first, first + n) of sample `sample`, counted over the call. Requires first % 4 == 0
// and fewer than 2^34 elements per sample.
struct DropoutRange {
  std::int64_t sample = 0;
  std::int64_t first = 0;
  std::int64_t n = 0;
};
// factors[i] = 0 with probability p, otherwise 1 / (1 - p). Element e uses word e % 4 of the
// counter (e / 4, sample, op, step), and is dropped when that word is below p 2^32.
void DropoutFactors(const DropoutKey& key, const DropoutRange& range, double p, float* factors);

}  // namespace shardwright
