// Jumps of the event loop over what it has met before.
//
// What happens between two anchors is kept as a Transition. It depends on the state at its begin
// and on the program from the first op that had not ended there to the last op that any stream had
// come to at its end. Where the same state meets the same stretch of program again, the loop jumps
// to the end of the transition; if that is the state of its begin, over all copies that follow.

#include <algorithm>
#include <cmath>

#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;
constexpr auto kCompute = static_cast<std::size_t>(Stream::kCompute);
// More transitions than any real step has; a bound for steps in which nothing recurs.
constexpr std::size_t kMostTransitions = 512;

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

std::int64_t LeadOf(const Anchor& anchor) {
  return anchor.time - anchor.issued;
}

}  // namespace

void EventLoop::BeginWatch(std::size_t level, const Anchor& now) {
  s_.memo.watches[level] = {true, now, 0, now.slack};
}

// Which streams a transition depends on, and the highest op they have come to. False when it leads
// out of the run.
bool EventLoop::FindStreams(const Watch& watch, Transition& transition,
                            std::uint32_t& highest) const {
  const BodyRun& run = s_.runs[watch.begin.run];
  const auto size = static_cast<std::uint32_t>(run.body->size());
  highest = 0;
  std::uint32_t asleep = 0;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    const Status before = watch.begin.streams[stream].status;
    if ((watch.moved >> stream & 1u) == 0 && before == head.status &&
        (before == Status::kBlocked || before == Status::kEmpty)) {
      asleep |= before == Status::kBlocked ? 1u << stream : 0;
      continue;
    }
    transition.streams |= 1u << stream;
    highest = std::max(highest, head.op);  // kNone: the stream has run out of ops
  }
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
      const StreamHead& head = s_.heads[stream];
      if ((asleep >> stream & 1u) != 0 && head.blocker <= highest) {
        asleep &= ~(1u << stream);
        transition.streams |= 1u << stream;
        highest = std::max(highest, head.op);
        has_changed = true;
      }
    }
  }
  return highest < run.base + size;
}

StreamDetail EventLoop::DetailOf(std::size_t stream, const Anchor& now) const {
  const StreamHead& head = s_.heads[stream];
  const EventRecord& record = s_.records[head.op];
  const BodyRun& run = s_.runs[now.run];
  const std::int64_t first = std::int64_t{run.base} + run.body->segments[now.segment].first;
  StreamDetail detail;
  detail.segment = static_cast<std::int32_t>(s_.cursors[stream].segment) -
                   static_cast<std::int32_t>(now.segment);
  detail.issued = record.issued - now.issued;
  detail.started = now_ - record.start;
  detail.idle = now_ - s_.stream_free[stream];
  detail.blocker = head.blocker - first;
  detail.blocker_stream = head.blocker_stream;
  detail.is_in_line = record.before_in_group != kNone && record.before_in_group >= now.lowest;
  detail.before_in_group = record.before_in_group - first;
  return detail;
}

// Keeps what was watched as a transition.
void EventLoop::EndWatch(std::size_t level, const Anchor& now) {
  Watch& watch = s_.memo.watches[level];
  const Anchor& begin = watch.begin;
  const BodyRun& run = s_.runs[now.run];
  if (!watch.is_on) {
    return;
  }
  watch.is_on = false;
  Transition transition;
  std::uint32_t highest = 0;
  if (begin.lowest < run.base || s_.memo.transitions.size() == kMostTransitions ||
      !FindStreams(watch, transition, highest)) {
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
  while (SegmentEnd(*run.body, begin.segment + transition.after) <= highest - run.base) {
    ++transition.after;
  }
  transition.lowest = lowest;
  transition.highest = highest - run.base - segments[begin.segment].first;
  transition.is_loop = true;
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
  transition.lead = LeadOf(begin);
  transition.time = now.time - begin.time;
  transition.host = now.issued - begin.issued;
  transition.finished = begin.unfinished - now.unfinished;
  AddScaled(transition.totals, begin.totals, now.totals, 1);
  std::uint32_t& first = s_.memo.first[level][segments[begin.segment].kind];
  transition.next = first;
  first = static_cast<std::uint32_t>(s_.memo.transitions.size());
  s_.memo.transitions.push_back(transition);
}

// The streams that the transition does not depend on wait for what follows it, when it begins at
// `segment`.
bool EventLoop::OthersSleep(const Transition& transition, std::size_t segment) const {
  const BodyRun& run = s_.runs[s_.heads[kCompute].run];
  const std::uint32_t highest = run.base + run.body->segments[segment].first + transition.highest;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    const bool sleeps = head.status == Status::kEmpty ||
                        (head.status == Status::kBlocked && head.blocker > highest);
    if ((transition.streams >> stream & 1u) == 0 && !sleeps) {
      return false;
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
  const std::int64_t more_lead = LeadOf(now) - transition.lead;
  if (transition.slack < 0 ? more_lead != 0 : more_lead < 0 && -more_lead > transition.slack) {
    return false;
  }
  const std::uint32_t lowest = now.lowest - s_.runs[now.run].base;
  const std::size_t known = transition.segment - transition.before;
  const std::size_t later = now.segment - transition.before;
  for (std::size_t s = 0; s <= std::size_t{transition.before} + transition.after; ++s) {
    if (!AreAlike({segments[known + s], transition.lowest}, {segments[later + s], lowest})) {
      return false;
    }
  }
  return OthersSleep(transition, now.segment);
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
  const std::size_t last = now.segment + transition.after;
  // Segments up to here are like the ones one period before.
  std::size_t end = now.segment - transition.before + period;
  while (end < segments.size() &&
         AreAlike({segments[end - period], lowest}, {segments[end], lowest})) {
    ++end;
  }
  std::size_t count = end > last ? 1 + (end - 1 - last) / period : 1;
  if (gain < 0) {
    const std::int64_t slack = transition.slack + (LeadOf(now) - transition.lead);
    count = static_cast<std::size_t>(
        std::min<std::int64_t>(static_cast<std::int64_t>(count), 1 + slack / -gain));
  }
  while (count > 1 && !OthersSleep(transition, now.segment + (count - 1) * period)) {
    --count;
  }
  return static_cast<std::uint32_t>(count);
}

// Takes a known transition that matches, if there is one.
bool EventLoop::Jump(std::size_t level, const Anchor& now) {
  if (now.lowest < s_.runs[now.run].base) {
    return false;
  }
  std::uint32_t next = s_.memo.first[level][s_.memo.body->segments[now.segment].kind];
  while (next != kNone) {
    const Transition& transition = s_.memo.transitions[next];
    if (Matches(transition, now)) {
      const std::uint32_t count = CountLoops(transition, now);
      s_.memo.jumps.push_back({next, count, now.run, now.segment, now.time});
      Apply(transition, count, now);
      return true;
    }
    next = transition.next;
  }
  return false;
}

// Moves the whole state to the end of `count` transitions.
void EventLoop::Apply(const Transition& transition, std::uint32_t count, const Anchor& from) {
  BodyRun& run = s_.runs[from.run];
  Anchor to;
  to.run = from.run;
  to.segment = from.segment + count * transition.advance;
  to.issued = from.issued + count * transition.host;
  AddScaled(run.totals, Totals(), transition.totals, count);
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    if (head.status == Status::kRunning) {
      run.totals.busy[stream] += now_ - s_.records[head.op].start;
    }
  }
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
    issue_slack_ += LeadOf(from) - transition.lead + std::min<std::int64_t>(gain, 0) * (count - 1);
  }
}

// Puts a stream where it stands at the end of a transition that ends at `to`.
void EventLoop::SetStream(std::size_t stream, const Transition& transition, const Anchor& to) {
  const StreamPosition& position = transition.end[stream];
  const StreamDetail& detail = transition.details[stream];
  const BodyRun& run = s_.runs[to.run];
  const std::int64_t first = std::int64_t{run.base} + run.body->segments[to.segment].first;
  const auto number = [&](std::int64_t op) { return static_cast<std::uint32_t>(first + op); };
  StreamHead& head = s_.heads[stream];
  head.status = position.status;
  head.op = number(position.op);
  head.run = to.run;
  head.cost = &CostOf(run, head.op);
  head.blocker = number(detail.blocker);
  head.blocker_stream = detail.blocker_stream;
  EventRecord& record = s_.records[head.op];
  record.issued = to.issued + detail.issued;
  record.issue_end = record.issued - head.cost->first + head.cost->issue;
  record.start = now_ - detail.started;
  record.before_in_group = detail.is_in_line ? number(detail.before_in_group) : kNone;
  s_.stream_free[stream] = now_ - detail.idle;
  s_.first_ended[stream] = head.op;  // what ended before holds up nothing that is still to come
  s_.cursors[stream] = {to.run, head.op - run.base + 1, 0, record.issue_end, false};
  s_.cursors[stream].segment =
      static_cast<std::uint32_t>(static_cast<std::int32_t>(to.segment) + detail.segment);
  if (head.status == Status::kTimed) {
    head.time = now_ - position.age;
  }
  if (head.status == Status::kRunning) {
    head.since = now_ - position.age;
    head.remaining = position.remaining;
    head.end_bound = record.issue_end + head.cost->tail;
    running_key_ |= std::uint64_t{head.cost->contention_class} << (8 * stream);
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
      ends[stream] = moves ? last + transition.end[stream].op : begins[stream];
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
