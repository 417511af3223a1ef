// States of the event loop at the moments when the compute stream enters a segment (see Anchor in
// engine_events.h). When nothing waits for the host, what happens next depends on the streams'
// positions and on the work left of the running ops only. So equal states one step apart end the
// simulation, and equal states within a step allow jumps (event_memo.cc).

#include <algorithm>

#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;
constexpr auto kCompute = static_cast<std::size_t>(Stream::kCompute);

}  // namespace

void EventLoop::NoteComputeStart() {
  const std::uint32_t run = s_.heads[kCompute].run;
  if (s_.runs[run].kind == BodyKind::kInit || s_.runs[run].body->segments.empty()) {
    return;
  }
  anchor_is_due_ = run != anchor_run_ || s_.cursors[kCompute].segment != anchor_segment_;
}

Anchor EventLoop::AnchorNow() const {
  const StreamHead& compute = s_.heads[kCompute];
  const BodyRun& run = s_.runs[compute.run];
  Anchor anchor;
  anchor.run = compute.run;
  anchor.segment = s_.cursors[kCompute].segment;
  anchor.time = now_;
  anchor.issued = s_.records[compute.op].issued;
  anchor.lowest = compute.op;
  anchor.unfinished = run.unfinished;
  anchor.totals = run.totals;
  for (const BodyRun& other : s_.runs) {
    Add(anchor.all_totals, other.totals);
  }
  const std::int64_t first = std::int64_t{run.base} + run.body->segments[anchor.segment].first;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    StreamPosition& position = anchor.streams[stream];
    position.status = head.status;
    if (head.status == Status::kEmpty) {
      continue;
    }
    anchor.lowest = std::min(anchor.lowest, head.op);
    position.op = std::int64_t{head.op} - first;
    if (head.status == Status::kTimed) {
      position.age = now_ - head.time;
      anchor.slack = -1;  // it waits for the host
    }
    if (head.status == Status::kRunning) {
      position.remaining = head.remaining;
      position.age = now_ - head.since;
      // What it has run so far counts here; so the sums do not depend on when it started.
      const std::int64_t busy = now_ - s_.records[head.op].start;
      anchor.all_totals.busy[stream] += busy;
      anchor.totals.busy[stream] += head.run == anchor.run ? busy : 0;
    }
  }
  return anchor;
}

// The anchors of this run so far become those of the run before.
void EventLoop::BeginAnchorsOfRun() {
  anchor_run_ = s_.heads[kCompute].run;
  anchor_segment_ = 0;
  std::swap(s_.anchors, s_.previous_anchors);
  s_.anchors.clear();
  for (Watch& watch : s_.memo.watches) {
    watch.is_on = false;
  }
  const Body* const body = s_.runs[anchor_run_].body;
  if (body != s_.memo.body) {
    s_.memo.body = body;
    s_.memo.transitions.clear();
    s_.memo.jumps.clear();
    s_.memo.filled_jumps = 0;
    for (auto& first : s_.memo.first) {
      first.clear();
    }
  }
}

// Compares an anchor with the one of the same segment one step ago. With equal states the time
// between them is the period, and nothing new will happen: what follows here is what followed
// there.
bool EventLoop::MeetsStepBefore(const Anchor& now, EngineResult& result) const {
  const BodyRun& run = s_.runs[now.run];
  const BodyRun& run_before = s_.runs[now.run - 1];
  const bool first_is_known = collected_ >= 2;  // init and the first step are complete
  if (run.kind != BodyKind::kStep || run_before.kind != BodyKind::kStep || steps_are_used_up_ ||
      !first_is_known) {
    return false;
  }
  const auto before = std::lower_bound(
      s_.previous_anchors.begin(), s_.previous_anchors.end(), now.segment,
      [](const Anchor& anchor, std::uint32_t segment) { return anchor.segment < segment; });
  if (before == s_.previous_anchors.end() || before->segment != now.segment ||
      !(before->streams == now.streams)) {
    return false;
  }
  // What is left of the body before must be left of the same body.
  if (now.lowest < run.base && s_.runs[now.run - 2].kind != BodyKind::kStep) {
    return false;
  }
  std::int64_t slack = kNotDone;
  for (auto it = before; it != s_.previous_anchors.end(); ++it) {
    slack = std::min(slack, it->slack);
  }
  for (const Anchor& anchor : s_.anchors) {
    slack = std::min(slack, anchor.slack);
  }
  const std::int64_t period = now.time - before->time;
  const std::int64_t host = now.issued - before->issued;
  if (host > period || (host < period && slack < 0)) {
    return false;
  }
  result.steps = static_cast<int>(run.step) + 1;
  result.steady = ToStepTiming(before->all_totals, now.all_totals, period);
  result.steady.host_issue = SimTime(host);  // the host never waits
  result.is_steady = s_.recurs = true;
  result.simulated_ops = finished_;
  return true;
}

bool EventLoop::TakeAnchors(EngineResult& result) {
  anchor_is_due_ = false;
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    const StreamHead& head = s_.heads[stream];
    if (head.status == Status::kRunning) {
      // Its work may be done already, so that only its launches keep it from having ended.
      issue_slack_ = std::min(issue_slack_, head.work_end - head.end_bound);
    }
  }
  const std::uint32_t run = s_.heads[kCompute].run;
  if (run != anchor_run_) {
    if (!s_.anchors.empty()) {
      s_.anchors.back().slack = std::min(s_.anchors.back().slack, issue_slack_);
    }
    issue_slack_ = kNotDone;
    BeginAnchorsOfRun();
  }
  const std::vector<Segment>& segments = s_.runs[run].body->segments;
  while (true) {
    if (!s_.anchors.empty()) {
      s_.anchors.back().slack = std::min(s_.anchors.back().slack, issue_slack_);
    }
    for (Watch& watch : s_.memo.watches) {
      watch.slack = std::min(watch.slack, issue_slack_);
      watch.moved |= moved_;
    }
    issue_slack_ = kNotDone;
    moved_ = 0;
    const Anchor now = AnchorNow();
    if (MeetsStepBefore(now, result)) {
      return true;
    }
    bool enters_micro_batch = segments[now.segment].begins_micro_batch;
    for (std::uint32_t s = anchor_segment_ + 1; s < now.segment; ++s) {
      enters_micro_batch = enters_micro_batch || segments[s].begins_micro_batch;
    }
    anchor_segment_ = now.segment;
    s_.anchors.push_back(now);
    EndWatch(0, now);
    if (enters_micro_batch) {
      EndWatch(1, now);
      if (Jump(1, now)) {
        continue;
      }
      BeginWatch(1, now);
    } else if (now.segment + std::size_t{1} < segments.size() &&
               segments[now.segment + 1].begins_micro_batch) {
      // The last micro-batch is like the ones before up to here: what follows it is the optimizer.
      KeepWatched(1, now);
    }
    if (!Jump(0, now)) {
      BeginWatch(0, now);
      return false;
    }
  }
}

}  // namespace shardwright::internal
