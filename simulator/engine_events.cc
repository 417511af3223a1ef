// The engine with contention; see engine.h. Events at one moment are taken in this order: ops end,
// by stream; the host goes on; ops start, by stream. Since speeds depend on the set of running ops
// only, times do not depend on this order.

#include <algorithm>

#include "core/error.h"
#include "simulator/internal/event_loop.h"
#include "simulator/internal/workspace_state.h"

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;

}  // namespace

void EventLoop::Reset() {
  s_.runs.clear();
  s_.slots.clear();
  s_.memo.Clear();
  s_.recurs = false;
  op_count_ = 0;
  s_.heads = {};
  s_.last_on_stream.fill(kNone);
  s_.stream_free.fill(0);
  s_.first_ended.fill(0);
  s_.last_ended.fill(0);
  s_.last_in_group.fill(kNone);
  s_.cache.used = 0;
  std::fill(s_.cache.entries.begin(), s_.cache.entries.end(), SpeedCache::Entry());
  for (auto& queues : s_.queues) {
    queues.clear();
  }
  s_.queued_ops.clear();
  host_waits_ = HasHostOps(costs_) || (options_.stalls != nullptr && !options_.stalls->empty());
}

std::uint32_t EventLoop::RunOf(std::uint32_t op) const {
  auto run = static_cast<std::uint32_t>(s_.runs.size() - 1);
  while (s_.runs[run].base > op) {
    --run;
  }
  return run;
}

void EventLoop::SetHead(std::size_t stream, std::uint32_t op, std::uint32_t run, const Cost* cost) {
  StreamHead& head = s_.heads[stream];
  head.op = op;
  running_streams_ &= ~(1u << stream);
  timed_streams_ &= ~(1u << stream);
  if (op == kNone) {
    head.status = Status::kEmpty;
    waiting_streams_ &= ~(1u << stream);
    return;
  }
  head.status = Status::kUnknown;
  waiting_streams_ |= 1u << stream;
  head.run = run;
  head.cost = cost;
}

// Finds an op that has to end before the head of a stream can start; false when there is none.
bool EventLoop::FindBlocker(std::size_t stream) {
  StreamHead& head = s_.heads[stream];
  const BodyRun& run = s_.runs[head.run];
  const auto blocks = [&](std::uint32_t target) {
    if (target == kNone) {
      return false;
    }
    const std::uint8_t other = CostOf(RunOf(run, target), target).stream;
    if (s_.heads[other].op > target) {
      return false;
    }
    head.status = Status::kBlocked;
    head.blocker = target;
    head.blocker_stream = other;
    return true;
  };
  for (const Edge edge : EdgesOf(*run.body, head.op - run.base)) {
    if (blocks(Target(run, edge))) {
      return true;
    }
  }
  return blocks(s_.records[head.op].before_in_group);
}

// Starts the head of a stream, or finds out what it waits for. It is asked when the last thing
// waited for so far ends; so unless the host is late, the head starts now.
void EventLoop::Resolve(std::size_t stream) {
  if (FindBlocker(stream)) {
    return;
  }
  StreamHead& head = s_.heads[stream];
  const EventRecord& record = s_.records[head.op];
  issue_slack_ = std::min(issue_slack_, now_ - record.issued);
  if (record.issued <= now_) {
    Start(stream);
  } else {
    SetTimed(stream, record.issued);
  }
}

// The stream of the first edge that ended at `time`, not before the stream's last event; the op's
// own stream when the queue of its communicator was last.
std::uint8_t EventLoop::BindingStream(const BodyRun& run, std::uint32_t op,
                                      std::int64_t time) const {
  for (const Edge edge : EdgesOf(*run.body, op - run.base)) {
    const std::uint32_t target = Target(run, edge);
    if (target == kNone) {
      continue;
    }
    const Cost& cost = CostOf(RunOf(run, target), target);
    const bool is_last =
        cost.on_host ? s_.end[target] == time
                     : s_.stream_free[cost.stream] == time && target >= s_.first_ended[cost.stream];
    if (is_last) {
      return cost.stream;
    }
  }
  return kCompute;
}

void EventLoop::Start(std::size_t stream) {
  StreamHead& head = s_.heads[stream];
  EventRecord& record = s_.records[head.op];
  record.start = now_;
  SetRunning(stream);
  head.since = now_;
  head.remaining = static_cast<double>(head.cost->duration);
  head.end_bound = record.issue_end + head.cost->tail;
  if (options_.contention) {
    head.speed = 0;  // not known yet
    running_changed_ = true;
  } else {
    head.speed = 1;
    head.work_end = now_ + head.cost->duration;
    head.time = std::max(head.work_end, head.end_bound);
  }
  running_key_ |= std::uint64_t{head.cost->contention_class} << (8 * stream);
  if (stream == kCompute && !host_waits_) {
    NoteComputeStart();
  }
  if (stream == kCompute && now_ > s_.stream_free[stream]) {
    // An op issued inside the gap shares it with the host, and a growing lead changes the shares.
    issue_slack_ = std::min(issue_slack_, s_.stream_free[stream] - record.issued);
    BodyRun& run = s_.runs[head.run];
    ChargeGap(run.totals, {s_.stream_free[stream], record.issued, now_},
              BindingStream(run, head.op, now_));
  }
}

void EventLoop::Finish(std::size_t stream) {
  StreamHead& head = s_.heads[stream];
  BodyRun& run = s_.runs[head.run];
  issue_slack_ = std::min(issue_slack_, head.work_end - head.end_bound);
  const std::int64_t busy = now_ - s_.records[head.op].start;
  run.totals.busy[stream] += busy;
  if (stream == kCompute && head.cost->group != kNone) {
    run.totals.collectives_on_compute += busy;
  }
  run.last_end = now_;
  ++finished_;
  --run.unfinished;
  s_.end[head.op] = now_;
  if (s_.stream_free[stream] != now_) {
    s_.first_ended[stream] = head.op;
    s_.stream_free[stream] = now_;
  }
  s_.last_ended[stream] = head.op;
  moved_ |= 1u << stream;
  running_key_ &= ~(std::uint64_t{0xff} << (8 * stream));
  running_changed_ = options_.contention;
  if (host_waits_) {
    const std::uint32_t next = s_.records[head.op].next_on_stream;
    const std::uint32_t next_run = RunOf(next);
    SetHead(stream, next, next_run, next == kNone ? nullptr : &CostOf(s_.runs[next_run], next));
  } else {
    PullHead(stream);
  }
}

std::int64_t EventLoop::NextEvent() const {
  std::int64_t next = kNotDone;
  for (const std::size_t stream : Streams(running_streams_)) {
    next = std::min(next, s_.heads[stream].time);
  }
  for (const std::size_t stream : Streams(timed_streams_)) {
    next = std::min(next, s_.heads[stream].time);
  }
  return next;
}

// Two runs of the step differ by a shift only: every device op ends `period` later, up to what the
// rounding of contended durations allows, and the host keeps pace or is ahead anyway. A host that
// gains changes what compute waited for, until it is ahead of all gaps; if steps are left, those
// decide.
bool EventLoop::StepsAreSteady(const BodyRun& a, const BodyRun& b, std::int64_t period) const {
  const std::int64_t tolerance = options_.contention ? period / 1'000'000'000 : 0;
  if (b.host_end - a.host_end > period + tolerance) {
    return false;
  }
  constexpr auto kHost = static_cast<std::size_t>(Stream::kHost);
  if (b.totals.compute_idle[kHost] < a.totals.compute_idle[kHost] - tolerance &&
      b.step + 1 < static_cast<std::uint32_t>(options_.max_steps)) {
    return false;
  }
  for (std::uint32_t i = 0; i < b.body->size(); ++i) {
    if (CostOf(b, b.base + i).on_host) {
      continue;
    }
    const std::int64_t shift = s_.end[b.base + i] - s_.end[a.base + i];
    if (shift > period + tolerance || shift < period - tolerance) {
      return false;
    }
  }
  return true;
}

bool EventLoop::Collect(EngineResult& result) {
  while (collected_ < s_.runs.size()) {
    const BodyRun& run = s_.runs[collected_];
    if (run.unfinished > 0 || run.issued < run.body->size()) {
      return false;
    }
    const std::int64_t front = std::max({front_, run.last_end, run.host_end});
    const std::int64_t time = front - front_;
    front_ = front;
    ++collected_;
    if (run.kind == BodyKind::kInit) {
      result.init = SimTime(time);
      continue;
    }
    result.steps = static_cast<int>(run.step) + 1;
    result.simulated_ops = finished_;
    result.steady = ToStepTiming(Totals(), run.totals, time);
    if (run.step == 0) {
      result.first = result.steady;
    }
    late_time_ += result.steps > options_.max_steps / 2 ? time : 0;
    const BodyRun& before = s_.runs[collected_ - 2];
    if (run.kind == BodyKind::kStep && before.kind == BodyKind::kStep) {
      FillEnds();
      if (StepsAreSteady(before, run, time)) {
        result.is_steady = true;
        return true;
      }
    }
    if (result.steps == options_.max_steps) {
      const int late_steps = options_.max_steps - options_.max_steps / 2;
      result.steady.time = SimTime(late_time_ / late_steps);
      return true;
    }
  }
  return false;
}

// Starts what can start now, and finds out when the rest can.
void EventLoop::StartDue() {
  for (const std::size_t stream : Streams(waiting_streams_)) {
    const StreamHead& head = s_.heads[stream];
    if (head.status == Status::kTimed) {
      if (head.time <= now_) {
        Start(stream);
      }
    } else if (head.status == Status::kUnknown || s_.heads[head.blocker_stream].op > head.blocker) {
      Resolve(stream);
    }
  }
  if (running_changed_) {
    UpdateSpeeds();
  }
}

// Ends what ends now.
void EventLoop::FinishDue() {
  for (const std::size_t stream : Streams(running_streams_)) {
    if (s_.heads[stream].time <= now_) {
      Finish(stream);
    }
  }
  if (host_waits_) {
    if (host_blocker_ != kNone && HasEnded(host_blocker_)) {
      host_blocker_ = kNone;
    }
    IssueAhead();
  }
}

EngineResult EventLoop::Run() {
  EngineResult result;
  Reset();
  BeginNextBody();
  if (host_waits_) {
    IssueAhead();
  } else {
    PullFirstOps();
  }
  while (!HasCompleteRun() || !Collect(result)) {
    StartDue();
    if (anchor_is_due_ && TakeAnchors(result)) {
      break;
    }
    now_ = NextEvent();
    SW_CHECK(now_ != kNotDone, "the program waits for itself; Verify must reject it");
    FinishDue();
  }
  return result;
}

void EventLoop::AppendSpans(const BodyRun& run, std::vector<Span>& spans) const {
  std::array<std::int64_t, kStreamCount> stream_free{};
  for (const BodyRun& other : s_.runs) {
    for (std::uint32_t i = 0; i < other.body->size() && other.base < run.base; ++i) {
      const std::uint8_t stream = CostOf(other, other.base + i).stream;
      stream_free[stream] = s_.end[other.base + i];
    }
  }
  for (std::uint32_t i = 0; i < run.body->size(); ++i) {
    const std::uint32_t op = run.base + i;
    const EventRecord& record = s_.records[op];
    const Cost& cost = CostOf(run, op);
    Span span;
    span.step = run.step;
    span.body = run.kind;
    span.stream = static_cast<Stream>(cost.stream);
    span.op = OpId(i);
    span.issue_begin = SimTime(cost.on_host ? record.issued : record.issued - cost.first);
    span.issued = SimTime(record.issued);
    span.issue_end = SimTime(record.issue_end);
    std::int64_t ready = cost.on_host ? record.issued : stream_free[cost.stream];
    for (const Edge edge : run.body->EdgesOf(OpId(i))) {
      const std::uint32_t target = Target(run, edge);
      if (target != kNone) {
        ready = std::max(ready, s_.end[target]);
      }
    }
    stream_free[cost.stream] = s_.end[op];
    span.ready = SimTime(ready);
    span.arrival = span.start = SimTime(record.start);
    span.end = SimTime(s_.end[op]);
    spans.push_back(span);
  }
}

EngineResult RunEvents(const Program& program, const Repetitions& cuts, const PriceTable& prices,
                       const EngineOptions& options, EngineWorkspace::State& state,
                       std::vector<Span>* spans) {
  EventLoop loop(program, cuts, prices, options, state.costs, state.events);
  const EngineResult result = loop.Run();
  if (spans != nullptr) {
    for (const BodyRun& run : state.events.runs) {
      const auto last = static_cast<std::uint32_t>(result.steps - 1);
      if (run.step == 0 || run.step == last) {
        loop.AppendSpans(run, *spans);
      }
    }
  }
  return result;
}

}  // namespace shardwright::internal
