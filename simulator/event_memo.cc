// Jumps of the event loop over what it has met before.
//
// What happens from one anchor to another depends on the state at the first and on the ops that are
// looked at until the second. Where the same state meets the same ops again, the loop jumps to the
// second anchor; if its state is that of the first, over all copies that follow. What streams are
// blocked at there may lie in another stretch of the program and is looked up anew.

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;

// The segment of an op, which is near the segment `hint`.
std::uint32_t SegmentOf(const CutBody& body, std::uint32_t op, std::uint32_t hint) {
  while (body.cuts->segments[hint].first > op) {
    --hint;
  }
  while (body.SegmentEnd(hint) <= op) {
    ++hint;
  }
  return hint;
}

}  // namespace

// Takes the longest known transition that happens from the last anchor on, if there is one.
bool EventLoop::Jump() {
  const Memo& memo = s_.memo;
  const Anchor& now = memo.anchors.back();
  if (now.lowest < s_.runs[now.run].base) {
    return false;
  }
  const std::uint32_t kind = memo.cuts->segments[now.segment].kind;
  std::uint32_t from = kind < memo.last.size() ? memo.last[kind] : kNone;
  for (; from != kNone; from = memo.anchors[from].next) {
    auto last = static_cast<std::uint32_t>(
        std::min<std::size_t>(memo.anchors.size(), kMostTransitionAnchors) - 1);
    Transition transition = FindTransition(from, last, now);
    while (transition.to != from) {
      const std::uint32_t count = CountLoops(transition, now);
      if (Take(transition, now, count) || (count > 1 && Take(transition, now, count - 1))) {
        return true;
      }
      last = transition.to - 1;
      transition = FindTransition(from, last, now);
    }
  }
  return false;
}

// Takes a transition `count` times in a row. False when what streams are blocked at behind it is
// not blocked, so that it would have gone another way.
bool EventLoop::Take(const Transition& transition, const Anchor& now, std::uint32_t count) {
  const Anchor& begin = s_.memo.anchors[transition.from];
  const Anchor& end = s_.memo.anchors[transition.to];
  const Place to{now.run, now.segment + count * (end.segment - begin.segment)};
  if (!MoveHeads(transition, to, now.issued + count * (end.issued - begin.issued))) {
    return false;
  }
  s_.memo.jumps.push_back({transition, count, now.run, now.segment, now.time});
  Apply(transition, count, to);
  return true;
}

// Moves the heads to the end of a transition, `to`, where the op that starts was issued at
// `issued`, and looks up anew what streams come to that are blocked there. False, and nothing has
// moved, when a stream would not be blocked until then.
bool EventLoop::MoveHeads(const Transition& transition, const Place& to, std::int64_t issued) {
  const Anchor& end = s_.memo.anchors[transition.to];
  const std::uint32_t base = s_.runs[to.run].base;
  const std::uint32_t first = base + s_.memo.cuts->segments[to.segment].first;
  const auto heads_before = s_.heads;
  const auto cursors_before = s_.cursors;
  const std::uint32_t running_before = running_streams_;
  const std::uint32_t waiting_before = waiting_streams_;
  const std::uint32_t timed_before = timed_streams_;
  const bool were_used_up = steps_are_used_up_;
  for (const std::size_t stream : Streams(transition.streams)) {
    const StreamDetail& detail = end.details[stream];
    const auto op = static_cast<std::uint32_t>(first + detail.op);
    const Cost& cost = CostOf(s_.runs[to.run], op);
    EventRecord& record = s_.records[op];
    record.issued = issued + detail.issued;
    record.issue_end = record.issued - cost.first + cost.issue;
    PlaceCursor(stream, op, {to.run, SegmentOf(s_.memo, op - base, to.segment)});
    if (end.streams[stream].status == Status::kBlocked) {
      PullHead(stream);
    } else {
      SetHead(stream, op, to.run, &cost);
    }
  }
  for (const std::size_t stream : Streams(used_streams_)) {
    const bool moves = (transition.streams >> stream & 1u) != 0;
    const Status status = moves ? end.streams[stream].status : s_.heads[stream].status;
    const bool is_as_expected =
        status == Status::kEmpty || (s_.heads[stream].op != kNone &&
                                     (status == Status::kBlocked ? FindBlocker(stream) : moves));
    if (!is_as_expected) {
      s_.heads = heads_before;
      s_.cursors = cursors_before;
      running_streams_ = running_before;
      waiting_streams_ = waiting_before;
      timed_streams_ = timed_before;
      steps_are_used_up_ = were_used_up;
      return false;
    }
  }
  return true;
}

// Moves the rest of the state to the end of `count` transitions, where the heads are already.
void EventLoop::Apply(const Transition& transition, std::uint32_t count, const Place& to) {
  const Anchor& begin = s_.memo.anchors[transition.from];
  const Anchor& end = s_.memo.anchors[transition.to];
  const Anchor& now = s_.memo.anchors.back();
  BodyRun& run = s_.runs[now.run];
  const std::int64_t host_issue = run.totals.host_issue;
  run.totals = now.totals;
  AddScaled(run.totals, begin.totals, end.totals, count);
  run.totals.host_issue = host_issue;  // that of the whole run, once a stream has come to its end
  now_ += count * (end.time - begin.time);
  running_key_ = 0;
  for (const std::size_t stream : Streams(transition.streams)) {
    SetStream(stream, end, to);
  }
  // Of the running ops only how fast they run is not set yet.
  FindSpeeds();
  for (const std::size_t stream : Streams(running_streams_)) {
    StreamHead& head = s_.heads[stream];
    run.totals.busy[stream] -= now_ - s_.records[head.op].start;  // added when it ends
    head.speed = (*speeds_)[stream];
    head.work_end = head.since + static_cast<std::int64_t>(std::ceil(head.remaining / head.speed));
    head.time = std::max(head.work_end, head.end_bound);
  }
  run.unfinished -= count * (begin.unfinished - end.unfinished);
  run.last_end = std::max(run.last_end, now_);
  moved_ = transition.streams;
  issue_slack_ = transition.slack;
  const std::int64_t gain = end.Lead() - begin.Lead();
  if (transition.slack != kNotDone) {
    issue_slack_ += now.Lead() - begin.Lead() + std::min<std::int64_t>(gain, 0) * (count - 1);
  }
}

// Puts a stream where it stood at `end`, at the same place as seen from `to`.
void EventLoop::SetStream(std::size_t stream, const Anchor& end, const Place& to) {
  const StreamPosition& position = end.streams[stream];
  const StreamDetail& detail = end.details[stream];
  const BodyRun& run = s_.runs[to.run];
  const auto op = static_cast<std::uint32_t>(std::int64_t{run.base} +
                                             run.cuts->segments[to.segment].first + detail.op);
  s_.stream_free[stream] = now_ - detail.idle;
  s_.first_ended[stream] = op;  // what ended before holds up nothing that is still to come
  StreamHead& head = s_.heads[stream];
  head.status = position.status;
  EventRecord& record = s_.records[op];
  switch (position.status) {
    case Status::kBlocked:
      s_.last_ended[stream] = op;
      break;
    case Status::kTimed:
      SetTimed(stream, now_ - position.age);
      break;
    case Status::kRunning:
      SetRunning(stream);
      record.start = now_ - detail.started;
      head.since = now_ - position.age;
      head.remaining = position.remaining;
      head.end_bound = record.issue_end + head.cost->tail;
      running_key_ |= std::uint64_t{head.cost->contention_class} << (8 * stream);
      break;
    default:
      SW_CHECK(false, "a transition that ends between two events");
  }
}

// Gives the ops that jumps led past their ends. In order, since what a transition stands for may
// hold jumps itself.
void EventLoop::FillEnds() {
  Memo& memo = s_.memo;
  for (; memo.filled_jumps < memo.jumps.size(); ++memo.filled_jumps) {
    FillEnds(memo.jumps[memo.filled_jumps]);
  }
}

// The ends of their twins, shifted in time.
void EventLoop::FillEnds(const JumpNote& jump) {
  const Transition& transition = jump.transition;
  const Anchor& from = s_.memo.anchors[transition.from];
  const Anchor& to = s_.memo.anchors[transition.to];
  const std::vector<Segment>& segments = s_.memo.cuts->segments;
  const BodyRun& run = s_.runs[from.run];
  const std::int64_t first = std::int64_t{run.base} + segments[from.segment].first;
  const std::int64_t last = std::int64_t{run.base} + segments[to.segment].first;
  std::array<std::int64_t, kStreamCount> begins;
  std::array<std::int64_t, kStreamCount> ends;
  begins.fill(first);
  ends.fill(first);
  for (const std::size_t stream : Streams(transition.streams)) {
    const bool is_blocked = to.streams[stream].status == Status::kBlocked;
    begins[stream] += from.streams[stream].op;
    ends[stream] = last + to.details[stream].op + (is_blocked ? 1 : 0);
  }
  const std::int64_t begin = *std::min_element(begins.begin(), begins.end());
  const std::int64_t end = *std::max_element(ends.begin(), ends.end());
  for (std::uint32_t k = 0; k < jump.count; ++k) {
    const std::int64_t time = jump.time + k * (to.time - from.time) - from.time;
    const std::size_t segment = jump.segment + std::size_t{k} * (to.segment - from.segment);
    const std::int64_t distance =
        std::int64_t{s_.runs[jump.run].base} + segments[segment].first - first;
    for (std::int64_t x = begin; x < end; ++x) {
      const std::uint8_t stream = CostOf(run, static_cast<std::uint32_t>(x)).stream;
      if (x >= begins[stream] && x < ends[stream]) {
        s_.end[static_cast<std::size_t>(x + distance)] = s_.end[static_cast<std::size_t>(x)] + time;
      }
    }
  }
}

}  // namespace shardwright::internal
