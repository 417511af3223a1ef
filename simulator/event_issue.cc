// How ops reach the streams' queues: the host's side of the event loop. See event_loop.h.

#include <algorithm>

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
  static_cast<CutBody&>(run) = run.kind == BodyKind::kInit ? CutBody{&program_.init, &cuts_.init}
                               : run.kind == BodyKind::kWarmup
                                   ? CutBody{&program_.warmup, &cuts_.warmup}
                                   : CutBody{&program_.step, &cuts_.step};
  run.base = op_count_;
  op_count_ += static_cast<std::uint32_t>(run.body->size());
  run.unfinished = static_cast<std::uint32_t>(run.body->size());
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
  if (s_.end.size() < op_count_) {
    s_.end.resize(op_count_);
    s_.records.resize(op_count_);
  }
  run.host_begin = run.host_end = index > 0 ? s_.runs.back().host_end : 0;
  if (!host_waits_) {
    run.issued = static_cast<std::uint32_t>(run.body->size());
  }
  s_.runs.push_back(run);
  return true;
}

// Issues ops until every stream in use has one or the host is blocked. The host may run further
// ahead in reality; what it issues then is issued later here, with the same times.
void EventLoop::IssueAhead() {
  while (host_blocker_ == kNone) {
    BodyRun& run = s_.runs.back();
    const bool is_issued = run.issued == run.body->size();
    // Which streams are in use is known once `step` has been issued.
    const bool all_known = run.kind == BodyKind::kStep && (is_issued || run.step >= 2);
    if (all_known && (used_streams_ & ~(running_streams_ | waiting_streams_)) == 0) {
      return;
    }
    if (!is_issued) {
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
    EventRecord& record = s_.records[op];
    record.issued = host_ + cost.first;
    host_ += cost.issue;
    record.issue_end = host_;
    run.totals.host_issue += cost.issue;
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
  for (const std::size_t stream : Streams(used_streams_)) {
    const std::uint32_t last = s_.last_on_stream[stream];
    if (!HasEnded(last)) {
      host_blocker_ = last;
      return false;
    }
    done = std::max(done, s_.end[last]);
  }
  run.totals.host_blocked += done - host_;
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
    if (!HasEnded(target)) {
      host_blocker_ = target;
      return false;
    }
    ready = std::max(ready, s_.end[target]);
  }
  const std::int64_t start = std::max(host_, ready + cost.first);
  const std::int64_t end = start + cost.duration;
  s_.records[op] = {host_, host_, start, kNone, kNone};
  s_.end[op] = end;
  run.totals.host_blocked += start - host_;
  run.totals.busy[static_cast<std::size_t>(Stream::kHost)] += cost.duration;
  run.last_end = std::max(run.last_end, end);
  --run.unfinished;
  host_ = end;
  return true;
}

// Puts an issued op at the end of its stream and of its communicator.
void EventLoop::Append(std::uint32_t op, const Cost& cost) {
  EventRecord& record = s_.records[op];
  record.next_on_stream = kNone;
  record.before_in_group = kNone;
  if (cost.group != kNone) {
    record.before_in_group = s_.last_in_group[cost.group];
    s_.last_in_group[cost.group] = op;
  }
  const std::size_t stream = cost.stream;
  used_streams_ |= 1u << stream;
  if (((running_streams_ | waiting_streams_) >> stream & 1u) == 0) {
    SetHead(stream, op, static_cast<std::uint32_t>(s_.runs.size() - 1), &cost);
  } else {
    s_.records[s_.last_on_stream[stream]].next_on_stream = op;
  }
  s_.last_on_stream[stream] = op;
}

// The first look at a segment of its kind.
const SegmentQueues& EventLoop::FindQueues(const BodyRun& run, std::size_t segment) {
  const Body& body = *run.body;
  const std::size_t kind = run.cuts->KindOf(segment);
  std::vector<SegmentQueues>& known = s_.queues[static_cast<std::size_t>(run.kind)];
  if (kind >= known.size()) {
    known.resize(kind + 1);
  }
  SegmentQueues& queues = known[kind];
  queues.is_known = true;
  queues.op_begin = s_.queued_ops.size();
  queues.first_on_stream.fill(kNone);
  queues.last_in_group.fill(kNone);
  std::array<std::uint32_t, kStreamCount> last_on_stream;
  last_on_stream.fill(kNone);
  const std::uint32_t begin = run.cuts->Begin(segment);
  const std::uint32_t size = run.SegmentEnd(segment) - begin;
  for (std::uint32_t i = 0; i < size; ++i) {
    const Cost& cost = costs_[body.ops[begin + i].shape.value];
    QueuedOp queued;
    queued.host = queues.issue;
    queues.issue += cost.issue;
    if (cost.group != kNone) {
      queued.before_in_group = queues.last_in_group[cost.group];
      queues.last_in_group[cost.group] = i;
    }
    std::uint32_t& last = last_on_stream[cost.stream];
    (last == kNone ? queues.first_on_stream[cost.stream]
                   : s_.queued_ops[queues.op_begin + last].next_on_stream) = i;
    last = i;
    s_.queued_ops.push_back(queued);
  }
  return queues;
}

// The last collective of `group` before the segment at `end`, kNone if there is none.
std::uint32_t EventLoop::LastInGroup(const StreamCursor& end, std::uint32_t group) {
  std::size_t segment = end.segment;
  for (std::size_t r = end.run + std::size_t{1}; r-- > 0;) {
    const BodyRun& run = s_.runs[r];
    while (segment-- > 0) {
      const std::uint32_t op = QueuesOf(run, segment).last_in_group[group];
      if (op != kNone) {
        return run.base + run.cuts->Begin(segment) + op;
      }
    }
    segment = r > 0 ? s_.runs[r - 1].cuts->Count() : 0;
  }
  return kNone;
}

// Moves the cursor to the begin of the next run; false when its stream has no more ops.
bool EventLoop::EnterNextRun(StreamCursor& cursor, std::size_t stream) {
  BodyRun& run = s_.runs[cursor.run];
  run.host_end = cursor.host;
  run.totals.host_issue = run.host_end - run.host_begin;
  // If a step has nothing for this stream, later steps have nothing either.
  cursor.is_done = !cursor.has_ops && run.kind == BodyKind::kStep;
  if (!cursor.is_done && cursor.run + 1 == s_.runs.size() && !BeginNextBody()) {
    cursor.is_done = steps_are_used_up_ = true;
  }
  if (cursor.is_done) {
    return false;
  }
  const std::uint32_t next = cursor.run + 1;
  cursor = {};
  cursor.run = next;
  cursor.host = s_.runs[next].host_begin;
  EnterSegment(cursor, stream);
  return true;
}

// Lets a cursor point to its segment, before the stream's first op there.
void EventLoop::EnterSegment(StreamCursor& cursor, std::size_t stream) {
  const BodyRun& run = s_.runs[cursor.run];
  const SegmentQueues& queues = QueuesOf(run, cursor.segment);
  const std::uint32_t begin = run.cuts->Begin(cursor.segment);
  cursor.next = queues.first_on_stream[stream];
  cursor.segment_end =
      cursor.next != kNone ? cursor.segment + 1 : run.cuts->SameEnd(cursor.segment);
  cursor.issue = queues.issue;
  cursor.op_begin = queues.op_begin;
  cursor.first = run.base + begin;
  cursor.ops = run.body->ops.data() + begin;
}

// Moves a cursor that has found all ops of its segment to the next one with ops for its stream;
// false when there is none.
bool EventLoop::EnterNextSegment(StreamCursor& cursor, std::size_t stream) {
  do {
    cursor.host += (cursor.segment_end - cursor.segment) * cursor.issue;
    cursor.segment = cursor.segment_end;
    if (cursor.segment < s_.runs[cursor.run].cuts->Count()) {
      EnterSegment(cursor, stream);
    } else if (!EnterNextRun(cursor, stream)) {
      return false;
    }
  } while (cursor.next == kNone);
  return true;
}

// Makes the next op of a stream its head, with the times at which the host issues it.
void EventLoop::PullHead(std::size_t stream) {
  StreamCursor& cursor = s_.cursors[stream];
  if (cursor.is_done || (cursor.next == kNone && !EnterNextSegment(cursor, stream))) {
    SetHead(stream, kNone, 0, nullptr);
    return;
  }
  const QueuedOp& queued = s_.queued_ops[cursor.op_begin + cursor.next];
  const std::uint32_t op = cursor.first + cursor.next;
  const Cost& cost = costs_[cursor.ops[cursor.next].shape.value];
  EventRecord& record = s_.records[op];
  record.issued = cursor.host + queued.host + cost.first;
  record.issue_end = cursor.host + queued.host + cost.issue;
  record.before_in_group = kNone;
  if (cost.group != kNone) {
    record.before_in_group = queued.before_in_group != kNone ? cursor.first + queued.before_in_group
                                                             : LastInGroup(cursor, cost.group);
  }
  cursor.next = queued.next_on_stream;
  cursor.has_ops = true;
  SetHead(stream, op, cursor.run, &cost);
}

// Lets the cursor of a stream stand behind `op`, whose time of issue is known.
void EventLoop::PlaceCursor(std::size_t stream, std::uint32_t op, const Place& place) {
  StreamCursor& cursor = s_.cursors[stream];
  cursor.run = place.run;
  cursor.segment = place.segment;
  EnterSegment(cursor, stream);
  const std::uint32_t i = op - cursor.first;
  const QueuedOp& queued = s_.queued_ops[cursor.op_begin + i];
  cursor.next = queued.next_on_stream;
  cursor.host = s_.records[op].issued - costs_[cursor.ops[i].shape.value].first - queued.host;
  cursor.has_ops = true;
  cursor.is_done = false;
}

void EventLoop::PullFirstOps() {
  for (const Cost& cost : costs_) {
    used_streams_ |= cost.on_host ? 0 : 1u << cost.stream;
  }
  s_.cursors = {};
  for (const std::size_t stream : Streams(used_streams_)) {
    EnterSegment(s_.cursors[stream], stream);
    PullHead(stream);
  }
}

}  // namespace shardwright::internal
