// Cuts a body into segments and finds out which are alike; see repetition.h.

#include <algorithm>
#include <iterator>
#include <unordered_map>

#include "schedule/repetition.h"

namespace shardwright {
namespace {

// How many ops all micro-batches begin with, 0 if they do not part.
std::uint32_t CountShared(const Body& body) {
  const std::vector<std::uint32_t>& micro_batch_marks = body.micro_batch_marks;
  std::uint32_t shared = static_cast<std::uint32_t>(body.size());
  bool they_part = false;
  for (std::size_t m = 1; m + 1 < micro_batch_marks.size(); ++m) {
    const std::uint32_t first = micro_batch_marks[0];
    const std::uint32_t shift = micro_batch_marks[m] - first;
    const std::uint32_t size = micro_batch_marks[m + 1] - micro_batch_marks[m];
    const std::uint32_t most = std::min({shared, size, micro_batch_marks[1] - first});
    for (shared = 0; shared < most; ++shared) {
      const std::uint32_t op = first + shared;
      if (body.ops[op].shape != body.ops[op + shift].shape || !SameEdges(body, op, shift, first)) {
        they_part = true;
        break;
      }
    }
  }
  return they_part ? shared : 0;
}

// The layer marks and, where micro-batches part, one before the last op that all of them share and
// one before the last op of each. What the event loop knows of one micro-batch then takes it
// through another one up to there: how a segment goes on depends on the op that begins the next.
std::vector<std::uint32_t> WithSharedEnds(const Body& body) {
  const std::vector<std::uint32_t>& micro_batch_marks = body.micro_batch_marks;
  std::vector<std::uint32_t> marks = body.layer_marks;
  const std::uint32_t shared = CountShared(body);
  for (std::size_t m = 0; shared > 1 && m + 1 < micro_batch_marks.size(); ++m) {
    marks.push_back(micro_batch_marks[m] + shared - 1);
    marks.push_back(micro_batch_marks[m + 1] - 1);
  }
  std::sort(marks.begin(), marks.end());
  return marks;
}

// Marks inside the copies of `repeats`, except where a micro-batch begins: a copy is one segment.
std::vector<std::uint32_t> Cuts(const Body& body, std::span<const Repeat> repeats) {
  const auto end = static_cast<std::uint32_t>(body.size());
  const std::vector<std::uint32_t>& micro_batch_marks = body.micro_batch_marks;
  const std::vector<std::uint32_t> layer_marks = WithSharedEnds(body);
  std::vector<std::uint32_t> marks = {0};
  std::merge(micro_batch_marks.begin(), micro_batch_marks.end(), layer_marks.begin(),
             layer_marks.end(), std::back_inserter(marks));
  marks.erase(std::unique(marks.begin(), marks.end()), marks.end());
  std::vector<std::uint32_t> cuts;
  std::size_t next_repeat = 0;
  const Repeat* inner = nullptr;  // the last repeat begun that holds no micro-batches
  for (const std::uint32_t mark : marks) {
    for (; next_repeat < repeats.size() && repeats[next_repeat].first <= mark; ++next_repeat) {
      const Repeat& repeat = repeats[next_repeat];
      const auto inside =
          std::upper_bound(micro_batch_marks.begin(), micro_batch_marks.end(), repeat.first);
      const bool holds_micro_batches = inside != micro_batch_marks.end() &&
                                       *inside < repeat.first + repeat.period * repeat.count;
      inner = holds_micro_batches ? nullptr : &repeat;
    }
    const bool is_inside_copy = inner != nullptr &&
                                mark < inner->first + inner->period * inner->count &&
                                (mark - inner->first) % inner->period != 0;
    if (mark < end && !is_inside_copy) {
      cuts.push_back(mark);
    }
  }
  return cuts;
}

// Numbers stretches of words by content: equal stretches get equal numbers, from 0 on.
class Numbering {
 public:
  explicit Numbering(const std::vector<std::uint64_t>& words) : words_(words) {}

  // The number of words [begin, end).
  std::uint32_t NumberOf(std::size_t begin, std::size_t end) {
    std::uint64_t hash = end - begin;
    for (std::size_t i = begin; i < end; ++i) {
      hash = (hash ^ words_[i]) * 0x9e3779b97f4a7c15ULL;
      hash ^= hash >> 29;
    }
    const auto [from, to] = index_.equal_range(hash);
    for (auto it = from; it != to; ++it) {
      const Stretch& known = it->second;
      if (std::equal(words_.begin() + At(begin), words_.begin() + At(end),
                     words_.begin() + At(known.begin), words_.begin() + At(known.end))) {
        return known.number;
      }
    }
    const auto number = static_cast<std::uint32_t>(index_.size());
    index_.emplace(hash, Stretch{begin, end, number});
    return number;
  }

 private:
  struct Stretch {
    std::size_t begin = 0;
    std::size_t end = 0;
    std::uint32_t number = 0;
  };
  static std::ptrdiff_t At(std::size_t i) { return static_cast<std::ptrdiff_t>(i); }

  const std::vector<std::uint64_t>& words_;
  std::unordered_multimap<std::uint64_t, Stretch> index_;
};

}  // namespace

std::vector<Segment> FindSegments(const Body& body, std::span<const Repeat> repeats) {
  const auto end = static_cast<std::uint32_t>(body.size());
  const std::vector<std::uint32_t> cuts = Cuts(body, repeats);
  // One word per op with the number of its edges and one per edge, in two forms: `near` leaves out
  // where far edges lead to. Carried edges lead to before the body in either form.
  constexpr std::uint64_t kCarriedWord = std::uint64_t{1} << 40;
  constexpr std::uint64_t kFarWord = std::uint64_t{1} << 41;
  std::vector<std::uint64_t> near;
  std::vector<std::uint64_t> exact;
  near.reserve(body.ops.size() + body.edges.size());
  exact.reserve(body.ops.size() + body.edges.size());
  Numbering near_numbers(near);
  Numbering exact_numbers(exact);
  std::vector<Segment> segments;
  segments.reserve(cuts.size());
  for (std::size_t s = 0; s < cuts.size(); ++s) {
    Segment segment;
    segment.first = cuts[s];
    const std::uint32_t near_begin = s < kNearSegments ? 0 : cuts[s - kNearSegments];
    const std::size_t first_word = near.size();
    for (std::uint32_t i = cuts[s]; i < (s + 1 < cuts.size() ? cuts[s + 1] : end); ++i) {
      const auto edges = body.EdgesOf(OpId(i));
      near.push_back(std::uint64_t{body.ops[i].shape.value} << 32 | edges.size());
      exact.push_back(near.back());
      for (const Edge edge : edges) {
        const bool is_far = !edge.is_carried() && edge.value < near_begin;
        const std::uint64_t word = edge.is_carried() ? kCarriedWord : i - edge.value;
        near.push_back(is_far ? kFarWord : word);
        exact.push_back(word);
        segment.far_end = std::max(segment.far_end, is_far ? edge.value + 1 : 0);
      }
    }
    segment.kind = near_numbers.NumberOf(first_word, near.size());
    segment.exact_kind = exact_numbers.NumberOf(first_word, exact.size());
    segments.push_back(segment);
  }
  for (auto s = static_cast<std::uint32_t>(segments.size()); s-- > 0;) {
    const bool goes_on =
        s + 1 < segments.size() && segments[s + 1].exact_kind == segments[s].exact_kind;
    segments[s].same_end = goes_on ? segments[s + 1].same_end : s + 1;
  }
  return segments;
}

}  // namespace shardwright
