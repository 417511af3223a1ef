// States of the event loop at the moments when the compute stream enters a segment (see Anchor in
// engine_events.h). When nothing waits for the host, what happens next depends on the streams'
// positions and on the work left of the running ops only. So equal states one step apart end the
// simulation, and equal states within a step allow jumps (event_memo.cc).

#include <algorithm>

#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;

}  // namespace

void EventLoop::NoteComputeStart() {
  const std::uint32_t run = s_.heads[kCompute].run;
  if (s_.runs[run].kind == BodyKind::kInit || s_.runs[run].cuts->segments.empty()) {
    return;
  }
  anchor_is_due_ = run != anchor_run_ || s_.cursors[kCompute].segment != anchor_segment_;
}

// Notes where a stream stands and what it has done since the anchor before, null if there is none.
void EventLoop::AddStream(std::size_t stream, const Anchor* before, Anchor& anchor) const {
  const StreamHead& head = s_.heads[stream];
  const BodyRun& run = s_.runs[anchor.run];
  const std::int64_t first = std::int64_t{run.base} + run.cuts->segments[anchor.segment].first;
  StreamPosition& position = anchor.streams[stream];
  position.status = head.status;
  const bool waits = head.status == Status::kBlocked || head.status == Status::kEmpty;
  if (!waits || (before != nullptr && before->streams[stream].status != head.status)) {
    anchor.moved |= 1u << stream;
  }
  const bool has_moved = (anchor.moved >> stream & 1u) != 0;
  if (head.status == Status::kEmpty) {
    anchor.highest = has_moved ? kNone : anchor.highest;
    return;
  }
  anchor.lowest = std::min(anchor.lowest, head.op);
  position.op = std::int64_t{head.op} - first;
  const std::uint32_t op = head.status == Status::kBlocked ? s_.last_ended[stream] : head.op;
  if (has_moved && op >= run.base) {
    anchor.highest = std::max(anchor.highest, op - run.base);
  }
  const EventRecord& record = s_.records[op];
  anchor.details[stream] = {std::int64_t{op} - first, record.issued - anchor.issued,
                            now_ - record.start, now_ - s_.stream_free[stream]};
  if (head.status == Status::kTimed) {
    position.age = now_ - head.time;
    anchor.slack = -1;  // it waits for the host
  }
  if (head.status == Status::kRunning) {
    position.remaining = head.remaining;
    position.age = now_ - head.since;
    // What it has run so far counts here; so the sums do not depend on when it started.
    const std::int64_t busy = now_ - record.start;
    anchor.all_totals.busy[stream] += busy;
    anchor.totals.busy[stream] += head.run == anchor.run ? busy : 0;
  }
}

// Notes the present state.
void EventLoop::AddAnchor() {
  const StreamHead& compute = s_.heads[kCompute];
  Memo& memo = s_.memo;
  const bool is_first_of_run = memo.anchors.size() == memo.run_begin;
  const auto index = static_cast<std::uint32_t>(memo.anchors.size());
  Anchor& anchor = memo.anchors.emplace_back();
  anchor.run = compute.run;
  anchor.segment = s_.cursors[kCompute].segment;
  anchor.time = now_;
  anchor.issued = s_.records[compute.op].issued;
  anchor.lowest = compute.op;
  anchor.unfinished = s_.runs[anchor.run].unfinished;
  anchor.totals = s_.runs[anchor.run].totals;
  for (const BodyRun& run : s_.runs) {
    Add(anchor.all_totals, run.totals);
  }
  anchor.moved = moved_;
  for (const std::size_t stream : Streams(used_streams_)) {
    AddStream(stream, is_first_of_run ? nullptr : &anchor - 1, anchor);
  }
  moved_ = 0;
  anchor_segment_ = anchor.segment;
  if (index < kMostTransitionAnchors && anchor.lowest >= s_.runs[anchor.run].base) {
    const std::uint32_t kind = memo.cuts->segments[anchor.segment].kind;
    if (kind >= memo.last.size()) {
      memo.last.resize(kind + std::size_t{1}, kNone);
    }
    anchor.next = memo.last[kind];
    memo.last[kind] = index;
  }
}

// The anchors of this run so far become those of the run before.
void EventLoop::BeginAnchorsOfRun() {
  anchor_run_ = s_.heads[kCompute].run;
  Memo& memo = s_.memo;
  const CutBody& run = s_.runs[anchor_run_];
  if (run.body != memo.body) {
    memo.Clear();
    static_cast<CutBody&>(memo) = run;
  }
  // Older ones are of use as far as transitions may begin and end there.
  memo.run_before_begin = std::min(memo.run_begin, kMostTransitionAnchors);
  memo.anchors.erase(memo.anchors.begin() + memo.run_before_begin,
                     memo.anchors.begin() + memo.run_begin);
  memo.run_begin = static_cast<std::uint32_t>(memo.anchors.size());
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
  const std::vector<Anchor>& anchors = s_.memo.anchors;
  const auto end = anchors.begin() + s_.memo.run_begin;
  const auto before = std::lower_bound(
      anchors.begin() + s_.memo.run_before_begin, end, now.segment,
      [](const Anchor& anchor, std::uint32_t segment) { return anchor.segment < segment; });
  if (before == end || before->segment != now.segment || !(before->streams == now.streams)) {
    return false;
  }
  // What is left of the body before must be left of the same body.
  if (now.lowest < run.base && s_.runs[now.run - 2].kind != BodyKind::kStep) {
    return false;
  }
  std::int64_t slack = kNotDone;
  for (auto it = before; it != anchors.end() - 1; ++it) {
    slack = std::min(slack, it->slack);
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
  for (const std::size_t stream : Streams(running_streams_)) {
    // Its work may be done already, so that only its launches keep it from having ended.
    const StreamHead& head = s_.heads[stream];
    issue_slack_ = std::min(issue_slack_, head.work_end - head.end_bound);
  }
  if (s_.heads[kCompute].run != anchor_run_) {
    BeginAnchorsOfRun();
  }
  std::vector<Anchor>& anchors = s_.memo.anchors;
  do {
    if (!anchors.empty()) {
      anchors.back().slack = std::min(anchors.back().slack, issue_slack_);
    }
    issue_slack_ = kNotDone;
    AddAnchor();
    if (MeetsStepBefore(anchors.back(), result)) {
      return true;
    }
  } while (Jump());
  return false;
}

}  // namespace shardwright::internal
