// Jumps of the event loop over what it has met before.
//
// What happens between two anchors is kept as a Transition. It depends on the state at its begin
// and on the program from the first op that had not ended there to the last op that had been
// started or was due at its end. Where the same state meets the same stretch of program again, the
// loop jumps to the end of the transition; if that is the state of its begin, over all copies that
// follow. What streams are blocked at there may lie in another stretch and is looked up anew.

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;
// More transitions than any real step has; a bound for steps in which nothing recurs.
constexpr std::size_t kMostTransitions = 512;

// The segment of an op, which is near the segment `hint`.
std::uint32_t SegmentOf(const Body& body, std::uint32_t op, std::uint32_t hint) {
  while (body.segments[hint].first > op) {
    --hint;
  }
  while (SegmentEnd(body, hint) <= op) {
    ++hint;
  }
  return hint;
}

}  // namespace

void EventLoop::BeginWatch(std::size_t level, const Anchor& now) {
  s_.memo.watches[level] = {true, now, 0, now.slack};
}

// Which streams a transition depends on and how far. False when it leads out of the run.
bool EventLoop::FindStreams(const Watch& watch, const Anchor& now, Transition& transition) const {
  const BodyRun& run = s_.runs[watch.begin.run];
  const auto size = static_cast<std::uint32_t>(run.body->size());
  const std::uint32_t first = run.body->segments[watch.begin.segment].first;
  std::uint32_t highest = 0;
  std::uint32_t reach = 0;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    const Status before = watch.begin.streams[stream].status;
    const bool is_blocked = head.status == Status::kBlocked;
    if ((watch.moved >> stream & 1u) == 0 && before == head.status &&
        (is_blocked || before == Status::kEmpty)) {
      continue;
    }
    transition.streams |= 1u << stream;
    highest = std::max(highest, is_blocked ? s_.last_ended[stream] : head.op);
    reach = std::max(reach, head.op);  // kNone: the stream has run out of ops
  }
  if (highest >= run.base + size || reach == kNone) {
    return false;
  }
  transition.highest = highest - run.base - first;
  const std::uint32_t segment = watch.begin.segment;
  transition.after = SegmentOf(*run.body, highest - run.base, now.segment) - segment;
  transition.is_loop = reach < run.base + size;
  transition.reach =
      transition.is_loop ? SegmentOf(*run.body, reach - run.base, now.segment) - segment : 0;
  return true;
}

StreamDetail EventLoop::DetailOf(std::size_t stream, const Anchor& now) const {
  const StreamHead& head = s_.heads[stream];
  const BodyRun& run = s_.runs[now.run];
  const std::uint32_t first = run.base + run.body->segments[now.segment].first;
  const std::uint32_t op = head.status == Status::kBlocked ? s_.last_ended[stream] : head.op;
  StreamDetail detail;
  detail.op = std::int64_t{op} - first;
  detail.issued = s_.records[op].issued - now.issued;
  detail.started = now_ - s_.records[op].start;
  detail.idle = now_ - s_.stream_free[stream];
  return detail;
}

void EventLoop::EndWatch(std::size_t level, const Anchor& now) {
  KeepWatched(level, now);
  s_.memo.watches[level].is_on = false;
}

// Keeps what has been watched so far as a transition.
void EventLoop::KeepWatched(std::size_t level, const Anchor& now) {
  const Watch& watch = s_.memo.watches[level];
  const Anchor& begin = watch.begin;
  const BodyRun& run = s_.runs[now.run];
  if (!watch.is_on) {
    return;
  }
  Transition transition;
  if (begin.lowest < run.base || s_.memo.transitions.size() == kMostTransitions ||
      !FindStreams(watch, now, transition)) {
    return;
  }
  const std::vector<Segment>& segments = run.body->segments;
  transition.run = begin.run;
  transition.segment = begin.segment;
  transition.met = begin.time;
  transition.advance = now.segment - begin.segment;
  const std::uint32_t lowest = begin.lowest - run.base;
  while (segments[begin.segment - transition.before].first > lowest) {
    ++transition.before;
  }
  transition.lowest = lowest;
  transition.slack = watch.slack;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    if ((transition.streams >> stream & 1u) == 0) {
      continue;
    }
    transition.begin[stream] = begin.streams[stream];
    transition.end[stream] = now.streams[stream];
    transition.details[stream] = DetailOf(stream, now);
    transition.is_loop = transition.is_loop && begin.streams[stream] == now.streams[stream];
  }
  transition.lead = begin.Lead();
  transition.time = now.time - begin.time;
  transition.host = now.issued - begin.issued;
  transition.finished = begin.unfinished - now.unfinished;
  AddScaled(transition.totals, begin.totals, now.totals, 1);
  transition.totals.host_issue = 0;  // that of the whole run, once a stream has come to its end
  std::vector<std::uint32_t>& first = s_.memo.first[level];
  const std::uint32_t kind = segments[begin.segment].kind;
  if (kind >= first.size()) {
    first.resize(kind + std::size_t{1}, kNone);
  }
  transition.next = first[kind];
  first[kind] = static_cast<std::uint32_t>(s_.memo.transitions.size());
  s_.memo.transitions.push_back(transition);
}

// Takes a known transition that matches, if there is one.
bool EventLoop::Jump(std::size_t level, const Anchor& now) {
  if (now.lowest < s_.runs[now.run].base) {
    return false;
  }
  const std::vector<std::uint32_t>& first = s_.memo.first[level];
  const std::uint32_t kind = s_.memo.body->segments[now.segment].kind;
  std::uint32_t next = kind < first.size() ? first[kind] : kNone;
  for (; next != kNone; next = s_.memo.transitions[next].next) {
    const Transition& transition = s_.memo.transitions[next];
    if (!Matches(transition, now)) {
      continue;
    }
    const std::uint32_t count = CountLoops(transition, now);
    Anchor to;
    to.run = now.run;
    to.segment = now.segment + count * transition.advance;
    to.issued = now.issued + count * transition.host;
    if (MoveHeads(transition, to)) {
      s_.memo.jumps.push_back({next, count, now.run, now.segment, now.time});
      Apply(transition, count, now, to);
      return true;
    }
  }
  return false;
}

// Moves the heads to the end of a transition, `to`, and looks up anew what streams come to that are
// blocked there. False, and nothing has moved, when a stream would not be blocked until then.
bool EventLoop::MoveHeads(const Transition& transition, const Anchor& to) {
  const std::uint32_t base = s_.runs[to.run].base;
  const std::uint32_t first = base + s_.memo.body->segments[to.segment].first;
  const auto heads_before = s_.heads;
  const auto cursors_before = s_.cursors;
  const std::uint32_t running_before = running_streams_;
  const std::uint32_t waiting_before = waiting_streams_;
  const bool were_used_up = steps_are_used_up_;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    if ((transition.streams >> stream & 1u) == 0) {
      continue;
    }
    const StreamDetail& detail = transition.details[stream];
    const auto op = static_cast<std::uint32_t>(first + detail.op);
    const Cost& cost = CostOf(s_.runs[to.run], op);
    EventRecord& record = s_.records[op];
    record.issued = to.issued + detail.issued;
    record.issue_end = record.issued - cost.first + cost.issue;
    const std::uint32_t segment = SegmentOf(*s_.memo.body, op - base, to.segment);
    s_.cursors[stream] = CursorBehind(op, s_.runs[to.run], segment);
    const bool is_blocked = transition.end[stream].status == Status::kBlocked;
    SetHead(stream, is_blocked ? PullNext(stream) : op);
  }
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const bool moves = (transition.streams >> stream & 1u) != 0;
    const Status status = moves ? transition.end[stream].status : s_.heads[stream].status;
    const bool is_as_expected =
        status == Status::kEmpty || (s_.heads[stream].op != kNone &&
                                     (status == Status::kBlocked ? FindBlocker(stream) : moves));
    if (!is_as_expected) {
      s_.heads = heads_before;
      s_.cursors = cursors_before;
      running_streams_ = running_before;
      waiting_streams_ = waiting_before;
      steps_are_used_up_ = were_used_up;
      return false;
    }
  }
  return true;
}

// Moves the rest of the state to the end of `count` transitions, where the heads are already.
void EventLoop::Apply(const Transition& transition, std::uint32_t count, const Anchor& from,
                      const Anchor& to) {
  BodyRun& run = s_.runs[from.run];
  const std::int64_t host_issue = run.totals.host_issue;
  run.totals = from.totals;
  AddScaled(run.totals, Totals(), transition.totals, count);
  run.totals.host_issue = host_issue;
  now_ += count * transition.time;
  running_key_ = 0;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    if ((transition.streams >> stream & 1u) != 0) {
      SetStream(stream, transition, to);
    }
  }
  // Of the running ops only how fast they run is not set yet.
  FindSpeeds();
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    StreamHead& head = s_.heads[stream];
    if (head.status == Status::kRunning) {
      run.totals.busy[stream] -= now_ - s_.records[head.op].start;  // added when it ends
      head.speed = speeds_[stream];
      head.work_end =
          head.since + static_cast<std::int64_t>(std::ceil(head.remaining / head.speed));
      head.time = std::max(head.work_end, head.end_bound);
    }
  }
  run.unfinished -= count * transition.finished;
  run.last_end = std::max(run.last_end, now_);
  moved_ = transition.streams;
  issue_slack_ = transition.slack;
  const std::int64_t gain = transition.time - transition.host;
  if (transition.slack != kNotDone) {
    issue_slack_ += from.Lead() - transition.lead + std::min<std::int64_t>(gain, 0) * (count - 1);
  }
}

// Puts a stream where it stands at the end of a transition that ends at `to`.
void EventLoop::SetStream(std::size_t stream, const Transition& transition, const Anchor& to) {
  const StreamPosition& position = transition.end[stream];
  const StreamDetail& detail = transition.details[stream];
  const BodyRun& run = s_.runs[to.run];
  const auto op = static_cast<std::uint32_t>(std::int64_t{run.base} +
                                             run.body->segments[to.segment].first + detail.op);
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
      head.time = now_ - position.age;
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

// Gives the ops that jumps led past their ends: those of their twins, shifted in time. In order,
// since what a transition stands for may hold jumps itself.
void EventLoop::FillEnds() {
  Memo& memo = s_.memo;
  for (; memo.filled_jumps < memo.jumps.size(); ++memo.filled_jumps) {
    const JumpNote& jump = memo.jumps[memo.filled_jumps];
    const Transition& transition = memo.transitions[jump.transition];
    const std::vector<Segment>& segments = memo.body->segments;
    const BodyRun& run = s_.runs[transition.run];
    const std::int64_t first = std::int64_t{run.base} + segments[transition.segment].first;
    const std::int64_t last =
        std::int64_t{run.base} + segments[transition.segment + transition.advance].first;
    std::array<std::int64_t, kStreamCount> begins;
    std::array<std::int64_t, kStreamCount> ends;
    for (std::size_t stream = 0; stream < kStreamCount; ++stream) {
      const bool moves = (transition.streams >> stream & 1u) != 0;
      begins[stream] = first + (moves ? transition.begin[stream].op : 0);
      const bool is_blocked = transition.end[stream].status == Status::kBlocked;
      const std::int64_t op = transition.details[stream].op;
      ends[stream] = moves ? last + (is_blocked ? op + 1 : op) : begins[stream];
    }
    const std::int64_t begin = *std::min_element(begins.begin(), begins.end());
    const std::int64_t end = *std::max_element(ends.begin(), ends.end());
    for (std::uint32_t k = 0; k < jump.count; ++k) {
      const std::int64_t time = jump.time + k * transition.time - transition.met;
      const std::int64_t distance =
          std::int64_t{s_.runs[jump.run].base} +
          segments[jump.segment + std::size_t{k} * transition.advance].first - first;
      for (std::int64_t x = begin; x < end; ++x) {
        const std::uint8_t stream = CostOf(run, static_cast<std::uint32_t>(x)).stream;
        if (x >= begins[stream] && x < ends[stream]) {
          s_.end[static_cast<std::size_t>(x + distance)] =
              s_.end[static_cast<std::size_t>(x)] + time;
        }
      }
    }
  }
}

}  // namespace shardwright::internal
