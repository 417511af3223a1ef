// Whether what the event loop has met before is met again; see event_memo.cc.

#include <algorithm>

#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

// A segment, and the first op of its body that had not ended when what is looked at began.
struct SegmentAt {
  const Segment& segment;
  std::uint32_t lowest = 0;
};

// The ops of both segments wait for the same: far edges lead equally far or to what has ended.
bool AreAlike(const SegmentAt& a, const SegmentAt& b) {
  return a.segment.exact_kind == b.segment.exact_kind ||
         (a.segment.kind == b.segment.kind && a.segment.far_end <= a.lowest &&
          b.segment.far_end <= b.lowest);
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

}  // namespace

// The ops that the transition depends on are those of now. Its first and its last segment need not
// be like those of now as a whole.
bool EventLoop::OpsMatch(const Transition& transition, const Anchor& now) const {
  const Body& body = *s_.memo.body;
  const std::vector<Segment>& segments = body.segments;
  const std::uint32_t lowest = now.lowest - s_.runs[now.run].base;
  const std::uint32_t shift = segments[now.segment].first - segments[transition.segment].first;
  const std::size_t known = transition.segment - transition.before;
  const std::size_t later = now.segment - transition.before;
  const std::size_t last = std::size_t{transition.before} + transition.after;
  for (std::size_t s = 0; s <= last; ++s) {
    if (AreAlike({segments[known + s], transition.lowest}, {segments[later + s], lowest})) {
      continue;
    }
    const std::uint32_t end = SegmentEnd(body, known + s);
    const bool has_end = s >= transition.before && s < transition.before + transition.advance;
    if ((s != 0 && s != last) || (has_end && end + shift != SegmentEnd(body, later + s))) {
      return false;
    }
    const std::uint32_t from = s == 0 ? transition.lowest : segments[known + s].first;
    const std::uint32_t to =
        s == last ? segments[transition.segment].first + transition.highest + 1 : end;
    for (std::uint32_t i = from; i < to; ++i) {
      if (!OpsAreAlike(body, {i, transition.lowest}, {i + shift, lowest})) {
        return false;
      }
    }
  }
  return true;
}

bool EventLoop::Matches(const Transition& transition, const Anchor& now) const {
  const std::vector<Segment>& segments = s_.memo.body->segments;
  if (now.segment < transition.before || now.segment + transition.after >= segments.size()) {
    return false;
  }
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    if ((transition.streams >> stream & 1u) != 0 &&
        !(transition.begin[stream] == now.streams[stream])) {
      return false;
    }
  }
  const std::int64_t more_lead = now.Lead() - transition.lead;
  if (transition.slack < 0 ? more_lead != 0 : more_lead < 0 && -more_lead > transition.slack) {
    return false;
  }
  return OpsMatch(transition, now);
}

// How many times in a row a transition that matches now can be taken.
std::uint32_t EventLoop::CountLoops(const Transition& transition, const Anchor& now) const {
  const std::int64_t gain = transition.time - transition.host;  // in lead
  if (!transition.is_loop || (transition.slack < 0 && gain != 0)) {
    return 1;
  }
  const std::vector<Segment>& segments = s_.memo.body->segments;
  const std::uint32_t lowest = now.lowest - s_.runs[now.run].base;
  const std::size_t period = transition.advance;
  const std::size_t last = now.segment + transition.reach;
  // Segments up to here are like the ones one period before.
  std::size_t end = now.segment - transition.before + period;
  while (end < segments.size() &&
         AreAlike({segments[end - period], lowest}, {segments[end], lowest})) {
    ++end;
  }
  std::size_t count = end > last ? 1 + (end - 1 - last) / period : 1;
  if (gain < 0) {
    const std::int64_t slack = transition.slack + (now.Lead() - transition.lead);
    count = static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(count), 1 + slack / -gain));
  }
  return static_cast<std::uint32_t>(count);
}

}  // namespace shardwright::internal
