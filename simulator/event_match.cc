// Whether what the event loop has met before is met again; see event_memo.cc.

#include <algorithm>

#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

// The ops of both segments wait for the same: far edges lead equally far or to what has ended.
bool AreAlike(const CutBody& body, const SegmentAt& a, const SegmentAt& b) {
  const Segment& x = body.cuts->segments[a.segment];
  const Segment& y = body.cuts->segments[b.segment];
  return x.exact_kind == y.exact_kind ||
         (x.kind == y.kind && x.far_end <= a.lowest && y.far_end <= b.lowest);
}

// How many segments from `a` and from `b` on are alike, one after the other; those from `a` on need
// to be looked at as far as op `needed` only.
std::size_t CountAlike(const CutBody& body, SegmentAt a, SegmentAt b, std::uint32_t needed) {
  const std::vector<Segment>& segments = body.cuts->segments;
  const std::size_t first = a.segment;
  while (std::max(a.segment, b.segment) < segments.size() && segments[a.segment].first <= needed &&
         AreAlike(body, a, b)) {
    const Segment& x = segments[a.segment];
    const Segment& y = segments[b.segment];
    const std::size_t count =
        x.exact_kind == y.exact_kind ? std::min(x.same_end - a.segment, y.same_end - b.segment) : 1;
    a.segment += count;
    b.segment += count;
  }
  return a.segment - first;
}

// An op of a body, and the first op that had not ended when what is looked at began.
struct OpAt {
  std::uint32_t op = 0;
  std::uint32_t lowest = 0;
};

// Both ops are the same and wait for the same.
bool OpsAreAlike(const Body& body, const OpAt& a, const OpAt& b) {
  const auto edges_of_a = EdgesOf(body, a.op);
  const auto edges_of_b = EdgesOf(body, b.op);
  return body.ops[a.op].shape == body.ops[b.op].shape &&
         std::equal(edges_of_a.begin(), edges_of_a.end(), edges_of_b.begin(), edges_of_b.end(),
                    [&](const Edge& x, const Edge& y) {
                      if (x.is_carried() || y.is_carried()) {
                        return x.is_carried() && y.is_carried();
                      }
                      return a.op - x.value == b.op - y.value ||
                             (x.value < a.lowest && y.value < b.lowest);
                    });
}

// The first op from `begin` on, at most `end`, that is not like the one `shift` further on, where
// `lowest` is what had not ended.
std::uint32_t AlikeUntil(const Body& body, OpAt begin, std::uint32_t end, const OpAt& other) {
  const std::uint32_t shift = other.op - begin.op;
  std::uint32_t op = begin.op;
  while (op < end && op + shift < body.size() &&
         OpsAreAlike(body, {op, begin.lowest}, {op + shift, other.lowest})) {
    ++op;
  }
  return op;
}

// The first op that differs between what is met from `known` on and what is met from `now` on; some
// op behind `needed` if nothing differs up to there. The first and the last segment that are looked
// at need not be alike as a whole. 0 when what has not ended differs already.
std::uint32_t FirstDifference(const CutBody& body, const SegmentAt& known, const SegmentAt& now,
                              std::uint32_t needed) {
  const std::vector<Segment>& segments = body.cuts->segments;
  for (SegmentAt a = known, b = now; segments[a.segment].first > known.lowest;) {
    const std::uint32_t end = segments[a.segment].first;
    if (a.segment == 0 || b.segment == 0) {
      return 0;
    }
    const std::uint32_t shift = segments[b.segment].first - end;
    --a.segment;
    --b.segment;
    const std::uint32_t begin = std::max(segments[a.segment].first, known.lowest);
    if (!AreAlike(body, a, b) &&
        (begin != known.lowest ||
         AlikeUntil(*body.body, {begin, a.lowest}, end, {begin + shift, b.lowest}) != end)) {
      return 0;
    }
  }
  const std::size_t alike = CountAlike(body, known, now, needed);
  const std::size_t a = known.segment + alike;
  const std::size_t b = now.segment + alike;
  if (std::max(a, b) == segments.size()) {
    return body.SegmentEnd(a - 1);
  }
  const std::uint32_t end = std::min(body.SegmentEnd(a), needed + 1);
  return AlikeUntil(*body.body, {segments[a].first, known.lowest}, end,
                    {segments[b].first, now.lowest});
}

}  // namespace

// The longest transition from anchor `from` to one up to `last` that happens again from `now` on;
// leads nowhere if there is none.
Transition EventLoop::FindTransition(std::uint32_t from, std::uint32_t last,
                                     const Anchor& now) const {
  const std::vector<Anchor>& anchors = s_.memo.anchors;
  const CutBody& body = s_.memo;
  const Anchor& begin = anchors[from];
  const std::int64_t more_lead = now.Lead() - begin.Lead();
  Transition found{from, from};
  Transition next = found;
  std::uint32_t difference = 0;  // everything before is known to be alike
  while (next.to < last && anchors[next.to + 1].run == begin.run) {
    next.slack = std::min(next.slack, anchors[next.to].slack);
    const Anchor& end = anchors[++next.to];
    bool is_met = next.slack < 0 ? more_lead == 0 : more_lead >= 0 || -more_lead <= next.slack;
    for (const std::size_t stream : Streams(end.moved & ~next.streams)) {
      is_met = is_met && begin.streams[stream] == now.streams[stream];
    }
    next.streams |= end.moved;
    next.highest = std::max(next.highest, end.highest);
    if (is_met && next.highest >= difference && next.highest < body.body->size()) {
      const std::uint32_t needed =
          std::max(next.highest,
                   std::min(anchors[last].highest, static_cast<std::uint32_t>(body.body->size())));
      difference = FirstDifference(body, AtAnchor(begin), AtAnchor(now), needed);
    }
    if (!is_met || next.highest >= difference) {
      break;
    }
    found = next;
  }
  return found;
}

// How many times in a row a transition that happens from `now` on can be taken.
std::uint32_t EventLoop::CountLoops(const Transition& transition, const Anchor& now) const {
  const Anchor& begin = s_.memo.anchors[transition.from];
  const Anchor& end = s_.memo.anchors[transition.to];
  const std::int64_t gain = end.Lead() - begin.Lead();
  if (transition.slack < 0 && gain != 0) {
    return 1;
  }
  const CutBody& body = s_.memo;
  const std::vector<Segment>& segments = body.cuts->segments;
  std::int64_t reach = 0;  // the last op of the body that a stream has come to
  for (const std::size_t stream : Streams(transition.streams)) {
    if (!(begin.streams[stream] == end.streams[stream])) {
      return 1;
    }
    reach = std::max(reach, segments[end.segment].first + end.streams[stream].op);
  }
  const std::size_t period = end.segment - begin.segment;
  const SegmentAt place = AtAnchor(now);
  // Up to there the first copy must be like what is known: else it ends with other ops next on the
  // streams than it began with.
  if (FirstDifference(body, AtAnchor(begin), place, static_cast<std::uint32_t>(reach)) <= reach) {
    return 1;
  }
  SegmentAt first = place;  // that has not ended
  while (segments[first.segment].first > first.lowest) {
    --first.segment;
  }
  // Segments before `alike` are like the ones one period before.
  const SegmentAt second{first.segment + period, first.lowest};
  const std::size_t alike = second.segment + CountAlike(body, first, second, kNone);
  // The same ops may be cut into other segments here than where they were met before.
  const std::int64_t reach_here =
      reach + std::int64_t{segments[now.segment].first} - segments[begin.segment].first;
  std::size_t last = now.segment;
  while (last < segments.size() && body.SegmentEnd(last) <= reach_here) {
    ++last;
  }
  if (alike <= last) {
    return 1;  // behind the first copy another op may be next on a stream
  }
  std::size_t count = 1 + (alike - 1 - last) / period;
  // Of the last copy only the ops that the transition depends on must be the same.
  const SegmentAt next{
      now.segment + count * period,
      place.lowest + segments[now.segment + count * period].first - segments[now.segment].first};
  if (FirstDifference(body, AtAnchor(begin), next, transition.highest) > transition.highest) {
    ++count;
  }
  if (gain < 0) {
    const std::int64_t slack = transition.slack + (now.Lead() - begin.Lead());
    count = static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(count), 1 + slack / -gain));
  }
  return static_cast<std::uint32_t>(count);
}

}  // namespace shardwright::internal
