// Skipping of repeats in the event loop. See Anchor in engine_events.h: when nothing waits for the
// host, what happens after the start of a copy depends on the streams' positions and on the work
// left of the running ops only. When two copies in a row start alike, all later ones do, as far as
// the repeat goes.

#include <algorithm>

#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;

std::uint32_t EndOf(const Repeat& repeat) {
  return repeat.first + repeat.period * repeat.count;
}

}  // namespace

// Keeps the list of repeats that the compute stream is in, and notes when it enters a copy.
void EventLoop::NoteComputeStart() {
  const StreamHead& head = s_.heads[static_cast<std::size_t>(Stream::kCompute)];
  if (head.run != repeat_run_) {
    repeat_run_ = head.run;
    repeat_cursor_ = 0;
    s_.repeats.clear();
  }
  const BodyRun& run = s_.runs[head.run];
  const std::uint32_t i = head.op - run.base;
  while (!s_.repeats.empty() && EndOf(s_.repeats.back().repeat) <= i) {
    s_.repeats.pop_back();
  }
  const std::vector<Repeat>& all = run.body->repeats;
  for (; repeat_cursor_ < all.size() && all[repeat_cursor_].first <= i; ++repeat_cursor_) {
    if (EndOf(all[repeat_cursor_]) > i) {
      ActiveRepeat active;
      active.run = head.run;
      active.repeat = all[repeat_cursor_];
      active.next_anchor = active.repeat.first;
      s_.repeats.push_back(active);
    }
  }
  for (ActiveRepeat& active : s_.repeats) {
    if (i >= active.next_anchor) {
      active.copy = (i - active.repeat.first) / active.repeat.period;
      active.next_anchor = active.repeat.first + (active.copy + 1) * active.repeat.period;
      active.is_due = true;
      anchor_is_due_ = true;
    }
  }
}

Anchor EventLoop::AnchorOf(const ActiveRepeat& active) const {
  const BodyRun& run = s_.runs[active.run];
  const Repeat& repeat = active.repeat;
  const std::uint32_t copy_begin = run.base + repeat.first + active.copy * repeat.period;
  Anchor anchor;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    Anchor::StreamPosition& position = anchor.streams[stream];
    position.status = head.status;
    if (head.status == Status::kEmpty) {
      continue;
    }
    position.is_inside = IsInside(active, head.op);
    position.op = std::int64_t{head.op} - (position.is_inside ? copy_begin : 0);
    if (head.status == Status::kRunning) {
      position.remaining = head.remaining;
      position.age = now_ - head.since;
    }
  }
  anchor.time = now_;
  anchor.issued = s_.records[s_.heads[static_cast<std::size_t>(Stream::kCompute)].op].issued;
  anchor.unfinished = run.unfinished;
  anchor.totals = run.totals;
  return anchor;
}

// Compares the start of a repeat with the same point one step ago. With equal states at equal
// points the time between them is the period, and nothing new will happen: what follows here is
// what followed there.
bool EventLoop::MeetsStepBefore(const ActiveRepeat& active, EngineResult& result) {
  const BodyRun& run = s_.runs[active.run];
  const bool first_is_known = collected_ >= 2;  // init and the first step are complete
  if (run.kind != BodyKind::kStep || steps_are_used_up_) {
    return false;
  }
  if (active.run != point_run_) {
    point_run_ = active.run;
    std::swap(s_.points, s_.previous_points);
    s_.points.clear();
  }
  StepPoint point;
  point.op = s_.heads[static_cast<std::size_t>(Stream::kCompute)].op - run.base;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    Anchor::StreamPosition& position = point.streams[stream];
    position.status = head.status;
    if (head.status != Status::kEmpty) {
      position.op = std::int64_t{head.op} - run.base;
      point.lags = point.lags || head.run < active.run;
    }
    if (head.status == Status::kTimed) {
      position.age = now_ - head.time;
    }
    if (head.status == Status::kRunning) {
      position.remaining = head.remaining;
      position.age = now_ - head.since;
    }
  }
  point.time = now_;
  point.issued = s_.records[run.base + point.op].issued;
  for (const BodyRun& other : s_.runs) {
    AddScaled(point.totals, Totals(), other.totals, 1);
  }
  s_.points.push_back(point);

  const auto before = std::find_if(s_.previous_points.begin(), s_.previous_points.end(),
                                   [&](const StepPoint& p) { return p.op == point.op; });
  const BodyRun& run_before = s_.runs[active.run - 1];
  if (!first_is_known || before == s_.previous_points.end() || run_before.kind != BodyKind::kStep ||
      !(before->streams == point.streams)) {
    return false;
  }
  // What is left of the body before must be left of the same body.
  if (point.lags && s_.runs[active.run - 2].kind != BodyKind::kStep) {
    return false;
  }
  const std::int64_t period = point.time - before->time;
  const std::int64_t host = point.issued - before->issued;
  if (host > period || (host < period && before->issue_slack < 0)) {
    return false;
  }
  result.steps = static_cast<int>(run.step) + 1;
  result.steady = ToStepTiming(before->totals, point.totals, period);
  result.steady.host_issue = SimTime(host);  // the host never waits
  result.is_steady = true;
  result.simulated_ops = finished_;
  return true;
}

bool EventLoop::TakeAnchors(EngineResult& result) {
  anchor_is_due_ = false;
  for (ActiveRepeat& active : s_.repeats) {
    active.issue_slack = std::min(active.issue_slack, issue_slack_);
  }
  for (StepPoint& point : s_.points) {
    point.issue_slack = std::min(point.issue_slack, issue_slack_);
  }
  for (StepPoint& point : s_.previous_points) {
    point.issue_slack = std::min(point.issue_slack, issue_slack_);
  }
  issue_slack_ = kNotDone;
  for (std::size_t level = 0; level < s_.repeats.size(); ++level) {
    ActiveRepeat& active = s_.repeats[level];
    if (!active.is_due) {
      continue;
    }
    active.is_due = false;
    if (active.copy == 0 && MeetsStepBefore(active, result)) {
      return true;
    }
    const Anchor anchor = AnchorOf(active);
    const std::int64_t copies = active.has_anchor && anchor.streams == active.anchor.streams
                                    ? CopiesToSkip(active, anchor)
                                    : 0;
    if (copies > 0) {
      SkipCopies(active, anchor, copies);
      // What was found out about inner repeats belongs to a copy left behind.
      s_.repeats.resize(level + 1);
      const auto& all = s_.runs[active.run].body->repeats;
      while (repeat_cursor_ < all.size() &&
             all[repeat_cursor_].first + all[repeat_cursor_].period * all[repeat_cursor_].count <=
                 active.next_anchor - active.repeat.period) {
        ++repeat_cursor_;
      }
      return false;
    }
    active.anchor = anchor;
    active.has_anchor = true;
    active.issue_slack = kNotDone;
  }
  return false;
}

// How many copies can be skipped after `now`, the second of two equal anchors; 0 if anything could
// make the coming copies differ.
std::int64_t EventLoop::CopiesToSkip(const ActiveRepeat& active, const Anchor& now) const {
  const std::int64_t period = active.repeat.period;
  std::int64_t lowest = 0;
  std::int64_t highest = 0;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const Anchor::StreamPosition& position = now.streams[stream];
    const StreamHead& head = s_.heads[stream];
    if (position.status == Status::kEmpty) {
      continue;
    }
    if (position.status == Status::kTimed || position.status == Status::kUnknown) {
      return 0;
    }
    if (position.is_inside) {
      lowest = std::min(lowest, position.op);
      highest = std::max(highest, position.op);
    } else if (position.status == Status::kRunning) {
      return 0;
    }
    // A stream that waits for something outside stays where it is all the time.
    if (position.status == Status::kBlocked &&
        IsInside(active, head.blocker) != position.is_inside) {
      return 0;
    }
  }
  // Every stream stays inside the repeat.
  std::int64_t copies = active.repeat.count - active.copy - (highest + period) / period;
  if (active.issue_slack < 0) {
    return 0;  // something waited for the host
  }
  const std::int64_t host = now.issued - active.anchor.issued;
  const std::int64_t device = now.time - active.anchor.time;
  if (host > device) {
    copies = std::min(copies, active.issue_slack / (host - device));
  }
  return copies > 0 && EdgesAreSettled(active, lowest) ? copies : 0;
}

// Of op `offset` of every copy from `first_copy` on, edge number `edge` leads to an op that had
// ended when the repeat's anchor was taken, so it holds nothing up.
bool EventLoop::FarEdgesHaveEnded(const ActiveRepeat& active, std::uint32_t offset,
                                  std::size_t edge, std::uint32_t first_copy) const {
  const BodyRun& run = s_.runs[active.run];
  for (std::uint32_t k = first_copy; k < active.repeat.count; ++k) {
    const std::uint32_t op = active.repeat.first + k * active.repeat.period + offset;
    const std::uint32_t target = Target(run, EdgesOf(*run.body, op)[edge]);
    if (target != kNone && s_.end[target] > active.anchor.time) {
      return false;
    }
  }
  return true;
}

// Edges lead to ops inside the repeat, the same distance back in each copy, or to ops that had
// ended before the last two anchors. `lowest`: the first unfinished op, counted from the begin of
// the copy.
bool EventLoop::EdgesAreSettled(const ActiveRepeat& active, std::int64_t lowest) const {
  const Body& body = *s_.runs[active.run].body;
  const Repeat& repeat = active.repeat;
  const std::int64_t reach =
      (std::int64_t{active.copy} - 1) * repeat.period + lowest;  // back to the repeat's begin
  if (reach < 0) {
    return false;
  }
  const auto first_copy = static_cast<std::uint32_t>(reach / repeat.period);
  for (std::uint32_t j = 0; j < repeat.period; ++j) {
    const std::uint32_t x = repeat.first + active.copy * repeat.period + j;
    const auto edges = EdgesOf(body, x);
    const auto twin_edges = EdgesOf(body, x - repeat.period);
    for (std::size_t e = 0; e < edges.size(); ++e) {
      const bool is_near =
          !edges[e].is_carried() && edges[e].value == twin_edges[e].value + repeat.period;
      const bool is_settled = is_near ? std::int64_t{x} - edges[e].value <= reach
                                      : FarEdgesHaveEnded(active, j, e, first_copy);
      if (!is_settled) {
        return false;
      }
    }
  }
  return true;
}

// Gives the ops that are skipped their ends: what their twins in the copy before have, and a
// period.
void EventLoop::FillSkipped(const ActiveRepeat& active, std::int64_t copies, std::int64_t period) {
  const BodyRun& run = s_.runs[active.run];
  const std::uint32_t ops = active.repeat.period;
  const auto skipped = static_cast<std::uint32_t>(copies) * ops;
  std::array<std::uint32_t, kStreamCount> begin;  // of what is skipped on each stream
  begin.fill(kNone);
  std::uint32_t lowest = kNone;
  std::uint32_t highest = 0;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    if (head.status != Status::kEmpty && IsInside(active, head.op)) {
      begin[stream] = head.op;
      lowest = std::min(lowest, head.op);
      highest = std::max(highest, head.op);
    }
  }
  std::int64_t* const end = s_.end.data();
  const auto fill_by_stream = [&](std::uint32_t from, std::uint32_t to) {
    for (std::uint32_t x = from; x < to; ++x) {
      const std::uint32_t first = begin[CostOf(run, x).stream];
      if (first != kNone && x >= first && x < first + skipped) {
        end[x] = end[x - ops] + period;
      }
    }
  };
  bool all_move = true;  // every stream of the repeat goes on from copy to copy
  for (std::uint32_t x = highest; x < highest + ops; ++x) {
    all_move = all_move && begin[CostOf(run, x).stream] != kNone;
  }
  const std::uint32_t middle_end = lowest + skipped;
  if (!all_move || highest >= middle_end) {
    fill_by_stream(lowest, highest + skipped);
    return;
  }
  fill_by_stream(lowest, highest);
  for (std::uint32_t x = highest; x < middle_end; ++x) {
    end[x] = end[x - ops] + period;
  }
  fill_by_stream(middle_end, highest + skipped);
}

// Moves the whole state `copies` copies on.
void EventLoop::SkipCopies(ActiveRepeat& active, const Anchor& now, std::int64_t copies) {
  BodyRun& run = s_.runs[active.run];
  const auto ops = static_cast<std::uint32_t>(copies * active.repeat.period);
  const std::int64_t time = copies * (now.time - active.anchor.time);
  const std::int64_t host = copies * (now.issued - active.anchor.issued);
  FillSkipped(active, copies, now.time - active.anchor.time);
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    StreamHead& head = s_.heads[stream];
    if (!now.streams[stream].is_inside) {
      continue;
    }
    EventRecord record = s_.records[head.op];
    record.issued += host;
    record.issue_end += host;
    record.start += time;
    if (record.before_in_group != kNone && IsInside(active, record.before_in_group)) {
      record.before_in_group += ops;
    }
    head.op += ops;
    s_.records[head.op] = record;
    head.since += time;
    head.work_end += time;
    head.end_bound += host;
    head.time = std::max(head.work_end, head.end_bound);  // the copies to come may be launch-bound
    if (head.status == Status::kBlocked) {
      head.blocker += ops;
    }
    s_.stream_free[stream] += time;
    s_.cursors[stream].next += ops;
    s_.cursors[stream].host += host;
  }
  AddScaled(run.totals, active.anchor.totals, now.totals, copies);
  run.unfinished -=
      static_cast<std::uint32_t>(copies) * (active.anchor.unfinished - now.unfinished);
  now_ += time;
  // What is counted from further back sees the least slack of the copies left out as well.
  const std::int64_t loss = std::max<std::int64_t>(0, host - time);
  const std::int64_t least = active.issue_slack - loss;
  for (ActiveRepeat& other : s_.repeats) {
    other.issue_slack = std::min(other.issue_slack, least);
  }
  for (StepPoint& point : s_.points) {
    point.issue_slack = std::min(point.issue_slack, least);
  }
  for (StepPoint& point : s_.previous_points) {
    point.issue_slack = std::min(point.issue_slack, least);
  }
  active.copy += static_cast<std::uint32_t>(copies);
  active.next_anchor += ops;
  active.has_anchor = false;
  active.issue_slack = kNotDone;
}

}  // namespace shardwright::internal
