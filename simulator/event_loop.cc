// The device's side of the event loop: heads of streams start, run at their speeds, and end.
//
// Example: a kernel of 10 us and a gather of 4 us start together, and beside each other both run at
// 0.8 of their speed. The gather ends at 4 / 0.8 = 5 us. By then the kernel has done 5 x 0.8 = 4 us
// of its work. The other 6 us run at full speed, so it ends at 11 us.
//
// An op starts when it is the head of its stream, all its edges have ended, the collective before
// it on its communicator has ended, and the host has issued it. Speeds belong to the set of running
// ops and are solved once per set. A step costs O(ops * streams).

#include "simulator/internal/event_loop.h"

#include <algorithm>
#include <cmath>

namespace shardwright::internal {
namespace {

using Status = StreamHead::Status;

// Speeds of a set of running ops, solved once per set. Valid until the next call.
const Speeds& SpeedsOf(const ContentionModel& model, RunningKey key, SpeedCache& cache) {
  if (2 * cache.used >= cache.entries.size()) {
    std::fill(cache.entries.begin(), cache.entries.end(), SpeedCache::Entry());
    cache.used = 0;
  }
  const std::size_t mask = cache.entries.size() - 1;
  const auto low = static_cast<std::uint64_t>(key), high = static_cast<std::uint64_t>(key >> 64);
  std::size_t slot = ((low ^ high << 7) * 0x9e3779b97f4a7c15ULL >> 32) & mask;
  while (cache.entries[slot].key != key) {
    if (cache.entries[slot].key == 0) {
      RunningClasses classes;
      for (std::size_t s = 0; s < kStreamCount; ++s) {
        classes[s] = static_cast<std::uint8_t>(key >> (8 * s));
      }
      cache.entries[slot] = {key, SolveSpeeds(model, classes)};
      ++cache.used;
      break;
    }
    slot = (slot + 1) & mask;
  }
  return cache.entries[slot].speeds;
}

}  // namespace

EventLoop::EventLoop(const Program& program, const PriceTable& prices, const EngineOptions& options,
                     EventState& state, Peers* peers, std::size_t rank)
    : program_(program),
      contention_(prices.contention),
      options_(options),
      s_(state),
      peers_(peers),
      rank_(rank) {
  constexpr std::size_t kCacheSize = 256;  // real programs have some dozen sets
  s_.runs.clear();
  s_.slots.clear();
  s_.last_in_group.assign(program.groups.size(), kNone);
  s_.cache.used = 0;
  s_.cache.entries.assign(kCacheSize, SpeedCache::Entry());
  last_on_stream_.fill(kNone);
  for (const Op& op : program.step.ops) {
    const Cost& cost = s_.costs[op.shape.value];
    used_streams_ |= cost.on_host ? 0 : 1u << cost.stream;
  }
  BeginNextBody();
  IssueAhead();
}

std::uint32_t EventLoop::RunOf(std::uint32_t op) const {
  auto run = static_cast<std::uint32_t>(s_.runs.size() - 1);
  while (s_.runs[run].base > op) {
    --run;
  }
  return run;
}

void EventLoop::SetHead(std::size_t stream, std::uint32_t op) {
  StreamHead& head = heads_[stream];
  head.op = op;
  running_streams_ &= ~(1u << stream);
  if (op == kNone) {
    head.status = Status::kEmpty;
    return;
  }
  head.status = Status::kUnknown;
  waiting_streams_ |= 1u << stream;
  head.run = RunOf(op);
  head.cost = &CostOf(s_.runs[head.run], op);
}

// Finds an op that has to end before the head of a stream can start; false when there is none.
bool EventLoop::FindBlocker(StreamHead& head) const {
  const BodyRun& run = s_.runs[head.run];
  const auto blocks = [&](std::uint32_t target) {
    if (target == kNone) {
      return false;
    }
    const std::uint8_t stream = StreamOf(run, target);
    if (HasEnded(target, stream)) {
      return false;
    }
    head.status = Status::kBlocked;
    head.blocker = target;
    head.blocker_stream = stream;
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
  StreamHead& head = heads_[stream];
  if (FindBlocker(head)) {
    return;
  }
  head.status = Status::kTimed;
  head.time = s_.records[head.op].issued;
  if (head.time <= now_) {
    Ready(stream);
  }
}

void EventLoop::Ready(std::size_t stream) {
  StreamHead& head = heads_[stream];
  if (peers_ != nullptr && head.cost->group != kNone) {
    head.status = Status::kArrived;
    peers_->Arrive(rank_, stream);
  } else {
    Start(stream, head.cost->duration, s_.records[head.op].issue_end + head.cost->tail);
  }
}

void EventLoop::Start(std::size_t stream, std::int64_t duration, std::int64_t end_bound) {
  StreamHead& head = heads_[stream];
  s_.records[head.op].start = now_;
  head.status = Status::kRunning;
  running_streams_ |= 1u << stream;
  waiting_streams_ &= ~(1u << stream);
  head.since = now_;
  head.remaining = static_cast<double>(duration);
  head.end_bound = end_bound;
  head.speed = 0;
  running_changed_ = true;
  running_key_ |= RunningKey{head.cost->contention_class} << (8 * stream);
  if (stream == kCompute && now_ > stream_free_[stream]) {
    ChargeGap(head);
  }
}

// The compute stream was idle before an op that starts now: until the op was issued it waited for
// the host, and from then on for the edge that was last.
void EventLoop::ChargeGap(const StreamHead& head) {
  BodyRun& run = s_.runs[head.run];
  auto& idle = run.totals.compute_idle;
  const std::int64_t free = stream_free_[kCompute];
  const std::int64_t issued = s_.records[head.op].issued;
  idle[static_cast<std::size_t>(Stream::kHost)].value += std::max<std::int64_t>(issued - free, 0);
  if (const std::int64_t waited = now_ - std::max(free, issued); waited > 0) {
    idle[BindingStream(run, head.op)].value += waited;
  }
}

// The stream of the first edge that ended now; the op's own stream when the queue of its
// communicator was last.
std::uint8_t EventLoop::BindingStream(const BodyRun& run, std::uint32_t op) const {
  for (const Edge edge : EdgesOf(*run.body, op - run.base)) {
    const std::uint32_t target = Target(run, edge);
    if (target != kNone && s_.records[target].end == now_) {
      return StreamOf(run, target);
    }
  }
  return kCompute;
}

void EventLoop::Finish(std::size_t stream) {
  const StreamHead& head = heads_[stream];
  BodyRun& run = s_.runs[head.run];
  OpRecord& record = s_.records[head.op];
  const std::int64_t busy = now_ - record.start;
  run.totals.busy[stream].value += busy;
  if (stream == kCompute && head.cost->group != kNone) {
    run.totals.collectives_on_compute.value += busy;
  }
  record.end = run.last_end = stream_free_[stream] = now_;
  --run.unfinished;
  ++finished_;
  running_key_ &= ~(RunningKey{0xff} << (8 * stream));
  running_changed_ = true;
  SetHead(stream, record.next_on_stream);
}

std::int64_t EventLoop::NextEvent() const {
  std::int64_t next = kNotDone;
  for (const std::size_t stream : Streams(running_streams_)) {
    next = std::min(next, heads_[stream].time);
  }
  for (const std::size_t stream : Streams(waiting_streams_)) {
    if (heads_[stream].status == Status::kTimed) {
      next = std::min(next, heads_[stream].time);
    }
  }
  return next;
}

// Starts what can start now, and finds out when the rest can.
void EventLoop::StartDue() {
  for (const std::size_t stream : Streams(waiting_streams_)) {
    const StreamHead& head = heads_[stream];
    if (head.status == Status::kTimed) {
      if (head.time <= now_) {
        Ready(stream);
      }
    } else if (head.status == Status::kUnknown ||
               (head.status == Status::kBlocked && HasEnded(head.blocker, head.blocker_stream))) {
      Resolve(stream);
    }
  }
}

// Ends what ends now, and lets the host go on.
void EventLoop::FinishDue(std::int64_t now) {
  now_ = now;
  for (const std::size_t stream : Streams(running_streams_)) {
    if (heads_[stream].time <= now_) {
      Finish(stream);
    }
  }
  if (host_blocker_ != kNone && HasEnded(host_blocker_, host_blocker_stream_)) {
    host_blocker_ = kNone;
  }
  IssueAhead();
}

// The speeds of the present set of running ops.
const Speeds& EventLoop::FindSpeeds() {
  running_changed_ = false;
  if (options_.contention && running_key_ != speeds_key_) {
    // Key 0: nothing runs, or only ops without load.
    speeds_ = running_key_ == 0 ? &kFullSpeeds : &SpeedsOf(contention_, running_key_, s_.cache);
    speeds_key_ = running_key_;
  }
  return *speeds_;
}

void EventLoop::SetSpeed(std::size_t stream, double speed) {
  StreamHead& head = heads_[stream];
  if (head.speed == speed) {
    return;
  }
  const auto passed = static_cast<double>(now_ - head.since);
  head.remaining = std::max(0.0, head.remaining - passed * head.speed);
  head.since = now_;
  head.speed = speed;
  const auto left = static_cast<std::int64_t>(std::ceil(head.remaining / speed));
  head.time = std::max(now_ + left, head.end_bound);
}

void EventLoop::UpdateSpeeds() {
  if (running_changed_) {
    const Speeds& speeds = FindSpeeds();
    for (const std::size_t stream : Streams(running_streams_)) {
      SetSpeed(stream, speeds[stream]);
    }
  }
}

Span EventLoop::SpanOf(const BodyRun& run, std::uint32_t op, std::int64_t stream_free) const {
  const OpRecord& record = s_.records[op];
  const Cost& cost = CostOf(run, op);
  Span span;
  span.step = run.step;
  span.body = run.kind;
  span.stream = static_cast<Stream>(cost.stream);
  span.op = OpId(op - run.base);
  span.issue_begin = SimTime(cost.on_host ? record.issued : record.issued - cost.first);
  span.issued = SimTime(record.issued);
  span.issue_end = SimTime(record.issue_end);
  std::int64_t ready = cost.on_host ? record.issued : stream_free;
  for (const Edge edge : EdgesOf(*run.body, op - run.base)) {
    const std::uint32_t target = Target(run, edge);
    if (target != kNone) {
      ready = std::max(ready, s_.records[target].end);
    }
  }
  span.ready = SimTime(ready);
  span.arrival = span.start = SimTime(record.start);
  span.end = SimTime(record.end);
  return span;
}

}  // namespace shardwright::internal
