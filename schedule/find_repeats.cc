// Detection of repeated layers and micro-batches; see builder.h.

#include <algorithm>

#include "schedule/builder.h"

namespace shardwright {
namespace {

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

// Edges of op `i` and of its copy at `i + length`.
bool SameEdges(const Body& body, std::uint32_t i, std::uint32_t length) {
  const auto a = body.EdgesOf(OpId(i));
  const auto b = body.EdgesOf(OpId(i + length));
  if (a.size() != b.size()) {
    return false;
  }
  for (std::size_t e = 0; e < a.size(); ++e) {
    if (a[e].is_carried() || b[e].is_carried()) {
      // A carried edge may recur only as itself: its end time lies before the whole body.
      if (!(a[e] == b[e])) {
        return false;
      }
      continue;
    }
    const std::uint32_t distance_a = i - a[e].value;
    const std::uint32_t distance_b = i + length - b[e].value;
    const bool far = distance_a > 2 * length && distance_b > 2 * length;
    if (distance_a != distance_b && !(far && b[e].value <= a[e].value)) {
      return false;
    }
  }
  return true;
}

// Is [first + length, first + 2 length) a copy of [first, first + length)? Memory points before
// the very first op of the run belong to what came before, so op `first` compares them too: a run
// starts where they already repeat.
bool SameStretch(const Program& program, const Body& body, std::uint32_t first,
                 std::uint32_t length) {
  for (std::uint32_t i = first; i < first + length; ++i) {
    if (body.ops[i].shape != body.ops[i + length].shape) {
      return false;
    }
  }
  for (std::uint32_t i = first; i < first + length; ++i) {
    if (!SamePoints(program, body.PointsBefore(OpId(i)), body.PointsBefore(OpId(i + length))) ||
        !SameEdges(body, i, length)) {
      return false;
    }
  }
  return true;
}

// Greedy scan of `marks` (ascending, the last one is the end of the range): at each position take
// the shortest period that repeats at least `kLeastCount` times.
void FindRuns(const Program& program, const Body& body, std::span<const std::uint32_t> marks,
              std::vector<Repeat>& out) {
  constexpr std::uint32_t kLeastCount = 3;
  std::size_t i = 0;
  while (i + 1 < marks.size()) {
    Repeat best;
    std::size_t best_marks = 0;
    for (std::size_t p = 1; p <= kLongestPeriod && i + 2 * p < marks.size(); ++p) {
      const std::uint32_t length = marks[i + p] - marks[i];
      std::uint32_t count = 1;
      while (i + (count + 1) * p < marks.size() &&
             marks[i + (count + 1) * p] - marks[i + count * p] == length &&
             SameStretch(program, body, marks[i] + (count - 1) * length, length)) {
        ++count;
      }
      if (length > 0 && count >= kLeastCount && count * p > best_marks) {
        best = {marks[i], length, count};
        best_marks = count * p;
        break;  // a longer period of the same run saves nothing
      }
    }
    if (best_marks > 0) {
      out.push_back(best);
      i += best_marks;
    } else {
      ++i;
    }
  }
}

}  // namespace

std::vector<Repeat> FindRepeats(const Program& program, const Body& body,
                                std::span<const std::uint32_t> micro_batch_marks,
                                std::span<const std::uint32_t> layer_marks) {
  const auto end = static_cast<std::uint32_t>(body.size());
  std::vector<std::uint32_t> outer(micro_batch_marks.begin(), micro_batch_marks.end());
  outer.push_back(end);
  if (outer.front() != 0) {
    outer.insert(outer.begin(), 0);
  }
  std::vector<Repeat> outer_runs;
  FindRuns(program, body, outer, outer_runs);

  // Layers are looked for inside each micro-batch; of a run of equal micro-batches every copy gets
  // its own inner runs, so that each copy can be entered alone.
  std::vector<Repeat> result;
  std::size_t next_outer = 0;
  for (std::size_t s = 0; s + 1 < outer.size(); ++s) {
    if (next_outer < outer_runs.size() && outer_runs[next_outer].first == outer[s]) {
      result.push_back(outer_runs[next_outer++]);
    }
    std::vector<std::uint32_t> inner;
    for (const std::uint32_t m : layer_marks) {
      if (m >= outer[s] && m < outer[s + 1] && (inner.empty() || inner.back() != m)) {
        inner.push_back(m);
      }
    }
    inner.push_back(outer[s + 1]);
    FindRuns(program, body, inner, result);
  }
  return result;
}

}  // namespace shardwright
