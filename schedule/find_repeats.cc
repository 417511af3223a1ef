// Detection of repeated layers and micro-batches; see repetition.h.

#include <algorithm>

#include "schedule/repetition.h"

namespace shardwright {
namespace {

// Whether op `i` and its copy at `i + length` wait for the same. Edges that lead to before `free`
// and, of the copy, to before `free + length` may do so at any distance.
bool SameEdges(const Body& body, std::uint32_t i, std::uint32_t length, std::uint32_t free) {
  const auto a = body.EdgesOf(OpId(i));
  const auto b = body.EdgesOf(OpId(i + length));
  if (a.size() != b.size()) {
    return false;
  }
  for (std::size_t e = 0; e < a.size(); ++e) {
    if (a[e].is_carried() || b[e].is_carried()) {
      // Whichever slots they name: both lead to before the body.
      if (a[e].is_carried() != b[e].is_carried()) {
        return false;
      }
      continue;
    }
    const std::uint32_t distance_a = i - a[e].value;
    const std::uint32_t distance_b = i + length - b[e].value;
    const bool far = distance_a > 2 * length && distance_b > 2 * length;
    const bool is_free = a[e].value < free && b[e].value < free + length;
    if (distance_a != distance_b && !is_free && !(far && b[e].value <= a[e].value)) {
      return false;
    }
  }
  return true;
}

bool SamePoints(const Program& program, std::span<const MemoryPoint> a,
                std::span<const MemoryPoint> b) {
  return std::equal(
      a.begin(), a.end(), b.begin(), b.end(), [&](const MemoryPoint& x, const MemoryPoint& y) {
        const Buffer& bx = program.buffers[x.buffer.value];
        const Buffer& by = program.buffers[y.buffer.value];
        return x.kind == y.kind && x.recorded_streams == y.recorded_streams &&
               x.kind != PointKind::kAllocOnce && bx.size == by.size &&
               bx.category == by.category && bx.owner == by.owner && bx.on_host == by.on_host;
      });
}

// Is [first + length, first + 2 length) a copy of [first, first + length)? Memory points before
// the very first op of the run belong to what came before, so op `first` compares them too: a run
// starts where they already repeat.
bool SameStretch(const Program& program, const Body& body, std::uint32_t first,
                 std::uint32_t length, std::uint32_t free) {
  for (std::uint32_t i = first; i < first + length; ++i) {
    if (body.ops[i].shape != body.ops[i + length].shape) {
      return false;
    }
  }
  for (std::uint32_t i = first; i < first + length; ++i) {
    if (!SamePoints(program, body.PointsBefore(OpId(i)), body.PointsBefore(OpId(i + length))) ||
        !SameEdges(body, i, length, free)) {
      return false;
    }
  }
  return true;
}

// Greedy scan of `marks` (ascending, the last one is the end of the range): at each position take
// the shortest period that repeats at least kLeastRepeatCount times. With `first_differs` edges of
// the first copy may lead to other ops before the run than those of the second one do.
void FindRuns(const Program& program, const Body& body, std::span<const std::uint32_t> marks,
              bool first_differs, std::vector<Repeat>& out) {
  std::size_t i = 0;
  while (i + 1 < marks.size()) {
    std::size_t taken = 0;  // marks that a run covers
    for (std::size_t p = 1; p <= kLongestPeriod && i + kLeastRepeatCount * p < marks.size(); ++p) {
      const std::uint32_t length = marks[i + p] - marks[i];
      std::uint32_t count = 1;
      while (i + (count + 1) * p < marks.size() &&
             marks[i + (count + 1) * p] - marks[i + count * p] == length &&
             SameStretch(program, body, marks[i] + (count - 1) * length, length,
                         first_differs && count == 1 ? marks[i] : 0)) {
        ++count;
      }
      if (count >= kLeastRepeatCount) {
        out.push_back({marks[i], length, count});
        taken = count * p;
        break;  // a longer period of the same run saves nothing
      }
    }
    i += std::max<std::size_t>(taken, 1);
  }
}

// Appends each of `marks` (ascending) that lies below `end` once, then `end`.
void AppendMarks(std::span<const std::uint32_t> marks, std::uint32_t end,
                 std::vector<std::uint32_t>& out) {
  for (const std::uint32_t mark : marks) {
    if (mark < end && (out.empty() || mark > out.back())) {
      out.push_back(mark);
    }
  }
  if (out.empty() || end > out.back()) {
    out.push_back(end);
  }
}

}  // namespace

std::vector<Repeat> FindRepeats(const Program& program, const Body& body) {
  const std::span<const std::uint32_t> layer_marks = body.layer_marks;
  const auto end = static_cast<std::uint32_t>(body.size());
  std::vector<std::uint32_t> outer = {0};
  AppendMarks(body.micro_batch_marks, end, outer);
  std::vector<Repeat> outer_runs;
  FindRuns(program, body, outer, true, outer_runs);

  // Layers are looked for inside each micro-batch; of a run of equal micro-batches every copy gets
  // its own inner runs, so that each copy can be entered alone.
  std::vector<Repeat> result;
  std::size_t next_outer = 0;
  std::size_t next_mark = 0;
  std::vector<std::uint32_t> inner;
  for (std::size_t s = 0; s + 1 < outer.size(); ++s) {
    if (next_outer < outer_runs.size() && outer_runs[next_outer].first == outer[s]) {
      result.push_back(outer_runs[next_outer++]);
    }
    const std::size_t first_mark = next_mark;
    while (next_mark < layer_marks.size() && layer_marks[next_mark] < outer[s + 1]) {
      ++next_mark;
    }
    inner.clear();
    AppendMarks(layer_marks.subspan(first_mark, next_mark - first_mark), outer[s + 1], inner);
    FindRuns(program, body, inner, false, result);
  }
  return result;
}

}  // namespace shardwright
