// How ops reach the streams' queues: the host's side of the event loop.
//
// Example: op_issue 4 us and two launches of 3 us each. An op issued at host time 100 us can start
// at 107 us, behind its first launch, and the host goes on at 110 us. If the device is late anyway,
// issue costs nothing; if the host is late, compute idles, and the gap is charged to the host.
//
// The host issues in program order and runs ahead without limit here. It stops at a host wait
// (until its op has ended, plus the wake-up), and at a stall of the allocator.

#include <algorithm>

#include "core/threads.h"
#include "simulator/internal/event_loop.h"

namespace shardwright::internal {

// Makes the next body known to the host; false when all have been.
bool EventLoop::BeginNextBody() {
  const std::size_t index = s_.runs.size();
  if (index > static_cast<std::size_t>(options_.max_steps)) {
    return false;
  }
  BodyRun run;
  run.step = index <= 1 ? 0 : static_cast<std::uint32_t>(index - 1);
  run.kind = index == 0                                   ? BodyKind::kInit
             : index == 1 && !program_.warmup.ops.empty() ? BodyKind::kWarmup
                                                          : BodyKind::kStep;
  run.body = &BodyOf(program_, run.kind);
  run.base = op_count_;
  run.unfinished = static_cast<std::uint32_t>(run.body->size());
  op_count_ += run.unfinished;
  run.slot_begin = s_.slots.size();
  s_.slots.resize(run.slot_begin + program_.carry_slot_count, kNone);
  if (index > 0) {
    const BodyRun& before = s_.runs.back();
    for (std::size_t slot = 0; slot < program_.carry_slot_count; ++slot) {
      const bool is_set = slot < before.body->carries.size() && before.body->carries[slot].valid();
      s_.slots[run.slot_begin + slot] = is_set ? before.base + before.body->carries[slot].value
                                               : s_.slots[before.slot_begin + slot];
    }
  }
  if (s_.records.size() < op_count_) {
    s_.records.resize(op_count_);
  }
  run.host_end = host_;
  s_.runs.push_back(run);
  return true;
}

// Every stream in use has an op.
bool EventLoop::IsAhead() const {
  const std::uint32_t busy = running_streams_ | waiting_streams_;
  return used_streams_ != 0 && (used_streams_ & ~busy) == 0;
}

// Issues ops until every stream in use has one or the host is blocked. The host may run further
// ahead in reality; what it issues then is issued later here, with the same times.
void EventLoop::IssueAhead() {
  while (host_blocker_ == kNone && !IsAhead()) {
    ThrowIfStopped();
    BodyRun& run = s_.runs.back();
    if (run.issued < run.body->size()) {
      IssueOne(run);
    } else if (!BeginNextBody()) {
      return;
    }
  }
}

void EventLoop::IssueOne(BodyRun& run) {
  const std::uint32_t op = run.base + run.issued;
  const Cost& cost = CostOf(run, op);
  if (!TakeStall(run)) {
    return;
  }
  if (cost.on_host) {
    if (!IssueHostOp(run, op, cost)) {
      return;
    }
  } else {
    OpRecord& record = s_.records[op];
    record.issued = host_ + cost.first;
    host_ += cost.issue;
    record.issue_end = host_;
    run.totals.host_issue.value += cost.issue;
    Append(op, cost);
  }
  ++run.issued;
  run.host_end = host_;
}

// Delays the host by the stall before the next op of `run`, if there is one. False: the host waits
// for what runs on the device, `host_blocker_` being a part of it.
bool EventLoop::TakeStall(BodyRun& run) {
  if (options_.stalls == nullptr) {
    return true;
  }
  const std::vector<HostStall>& stalls = run.kind == BodyKind::kInit ? options_.stalls->init
                                         : run.step == 0             ? options_.stalls->first_step
                                                                     : options_.stalls->later_steps;
  while (run.stall_cursor < stalls.size() &&
         stalls[run.stall_cursor].before_op.value <= run.issued) {
    const HostStall& stall = stalls[run.stall_cursor];
    if (stall.drains && !WaitForDevice(run)) {
      return false;
    }
    host_ += stall.time.value;
    ++run.stall_cursor;
  }
  return true;
}

// The host goes on when all streams have done what was issued so far. False: not yet.
bool EventLoop::WaitForDevice(BodyRun& run) {
  std::int64_t done = host_;
  for (std::size_t stream = 0; stream < kStreamCount; ++stream) {
    const std::uint32_t last = last_on_stream_[stream];
    if (last == kNone) {
      continue;
    }
    if (!HasEnded(last, stream)) {
      host_blocker_ = last;
      host_blocker_stream_ = stream;
      return false;
    }
    done = std::max(done, s_.records[last].end);
  }
  run.totals.host_blocked.value += done - host_;
  host_ = done;
  return true;
}

// Runs a host op if all it waits for has ended; otherwise notes what blocks the host.
bool EventLoop::IssueHostOp(BodyRun& run, std::uint32_t op, const Cost& cost) {
  std::int64_t ready = kNever;
  for (const Edge edge : run.body->EdgesOf(OpId(op - run.base))) {
    const std::uint32_t target = Target(run, edge);
    if (target == kNone) {
      continue;
    }
    const std::uint8_t stream = StreamOf(run, target);
    if (!HasEnded(target, stream)) {
      host_blocker_ = target;
      host_blocker_stream_ = stream;
      return false;
    }
    ready = std::max(ready, s_.records[target].end);
  }
  // No wake-up where nothing had to be waited for.
  const std::int64_t start = std::max(host_, ready + cost.first);
  const std::int64_t end = start + cost.duration;
  s_.records[op] = {host_, host_, start, end, kNone, kNone};
  run.totals.host_blocked.value += start - host_;
  run.totals.busy[static_cast<std::size_t>(Stream::kHost)].value += cost.duration;
  run.last_end = std::max(run.last_end, end);
  --run.unfinished;
  host_ = end;
  return true;
}

// Puts an issued op at the end of its stream and of its communicator.
void EventLoop::Append(std::uint32_t op, const Cost& cost) {
  OpRecord& record = s_.records[op];
  record.next_on_stream = kNone;
  record.before_in_group = kNone;
  if (cost.group != kNone) {
    record.before_in_group = s_.last_in_group[cost.group];
    s_.last_in_group[cost.group] = op;
  }
  const std::size_t stream = cost.stream;
  if (((running_streams_ | waiting_streams_) >> stream & 1u) == 0) {
    SetHead(stream, op);
  } else {
    s_.records[last_on_stream_[stream]].next_on_stream = op;
  }
  last_on_stream_[stream] = op;
}

}  // namespace shardwright::internal
