#pragma once

// Where the bodies of a program repeat themselves: layers inside of micro-batches, micro-batches
// inside of a step. For people who read a program: nothing else depends on it. A program says no
// more than where such stretches may begin; all else is found here.

#include <cstdint>
#include <vector>

#include "schedule/program.h"

namespace shardwright {

// Ops [first, first + period * count) are `count` copies of the first `period` ops: same shapes,
// edges at the same distances, memory points of the same sizes. Intervals nest or are disjoint;
// an outer one stands before its inner ones.
struct Repeat {
  std::uint32_t first = 0;
  std::uint32_t period = 0;
  std::uint32_t count = 0;

  bool operator==(const Repeat&) const = default;
};

// Finds runs of at least kLeastRepeatCount equal consecutive stretches between the body's layer
// marks, inside the stretches between its micro-batch marks, and runs of those. A period is up to
// kLongestPeriod marks long; from the earliest mark on, the shortest one is taken. Two stretches of
// length p are equal when they have the same shapes; the same sizes, kinds and owners of memory
// points; and the same edge distances, except for far edges (further back than 2p), which must
// reach ever further back, as backward reaches into forward, and for carried ones, which may name
// any slots. The first of equal micro-batches may wait for other ops before itself than the second
// one does, since what is before it differs.
// O(ops * kLongestPeriod).
[[nodiscard]] std::vector<Repeat> FindRepeats(const Program& program, const Body& body);
inline constexpr std::uint32_t kLongestPeriod = 8;
inline constexpr std::uint32_t kLeastRepeatCount = 3;

}  // namespace shardwright
