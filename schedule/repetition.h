#pragma once

// Where the bodies of a program repeat themselves: layers inside of micro-batches, micro-batches
// inside of a step. An interpreter that knows it need not run again what it has met before. A
// program says no more than where such stretches may begin; all else is found here, and nothing
// depends on it but the time that an interpreter takes.

#include <cstdint>
#include <span>
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

// Ops from `first` to the next segment. Segments cut a body at its layers and micro-batches, so
// that an interpreter can recognise what it has met before.
struct Segment {
  std::uint32_t first = 0;
  // Equal kinds: same shapes, and edges at the same distances, but for far ones: those that lead
  // more than kNearSegments segments back.
  std::uint32_t kind = 0;
  std::uint32_t exact_kind = 0;  // the same, far edges included
  std::uint32_t far_end = 0;     // far edges lead to ops before this one; 0: there are none
  std::uint32_t same_end = 0;    // the first segment after it with another exact kind

  bool operator==(const Segment&) const = default;
};
inline constexpr std::uint32_t kNearSegments = 4;

// Of one body. Empty: nothing is known to repeat.
struct Repetition {
  std::vector<Repeat> repeats;
  std::vector<Segment> segments;  // ascending; they cover all ops

  // How many segments the body has, where one begins, and which is the next one that differs from
  // it; a body that was not cut is one segment.
  [[nodiscard]] std::size_t Count() const { return segments.empty() ? 1 : segments.size(); }
  [[nodiscard]] std::uint32_t Begin(std::size_t segment) const {
    return segments.empty() ? 0 : segments[segment].first;
  }
  [[nodiscard]] std::uint32_t SameEnd(std::size_t segment) const {
    return segments.empty() ? 1 : segments[segment].same_end;
  }
  [[nodiscard]] std::size_t KindOf(std::size_t segment) const {
    return segments.empty() ? 0 : segments[segment].kind;
  }
};

// Of a program's bodies.
struct Repetitions {
  Repetition init;
  Repetition warmup;
  Repetition step;
};
// FindRepeats and FindSegments of each body.
[[nodiscard]] Repetitions FindRepetitions(const Program& program);

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

// Whether op `i` and its copy at `i + length` wait for the same. Edges that lead to before `free`
// and, of the copy, to before `free + length` may do so at any distance.
[[nodiscard]] bool SameEdges(const Body& body, std::uint32_t i, std::uint32_t length,
                             std::uint32_t free);

// Cuts a body at its marks and, where micro-batches part, before the last op that all of them share
// and the last op of each, but not inside the copies of innermost `repeats`, and finds out which
// segments are alike. The last micro-batch mark is the end of the last micro-batch. Carried edges
// count as alike: all lead to before the body. O(ops + edges) expected.
[[nodiscard]] std::vector<Segment> FindSegments(const Body& body, std::span<const Repeat> repeats);

}  // namespace shardwright
