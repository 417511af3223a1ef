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
  run.body = run.kind == BodyKind::kInit     ? &program_.init
             : run.kind == BodyKind::kWarmup ? &program_.warmup
                                             : &program_.step;
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
  const auto same_body = std::find_if(s_.runs.begin(), s_.runs.end(),
                                      [&](const BodyRun& r) { return r.body == run.body; });
  if (same_body != s_.runs.end()) {
    run.segment_costs = same_body->segment_costs;
  } else {
    std::uint32_t kinds = 0;
    for (const Segment& segment : run.body->segments) {
      kinds = std::max(kinds, segment.kind + 1);
    }
    run.segment_costs = s_.segment_costs.size();
    s_.segment_costs.resize(run.segment_costs + kinds);
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
    if (all_known && (empty_streams_ & used_streams_) == 0) {
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
  TakeStall(run);
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

// Delays the host by the stall before the next op of `run`, if there is one.
void EventLoop::TakeStall(BodyRun& run) {
  if (options_.stalls == nullptr) {
    return;
  }
  const std::vector<HostStall>& stalls = run.kind == BodyKind::kInit ? options_.stalls->init
                                         : run.step == 0             ? options_.stalls->first_step
                                                                     : options_.stalls->later_steps;
  while (run.stall_cursor < stalls.size() &&
         stalls[run.stall_cursor].before_op.value <= run.issued) {
    host_ += stalls[run.stall_cursor].time.value;
    ++run.stall_cursor;
  }
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
  if ((empty_streams_ >> stream & 1u) != 0) {
    SetHead(stream, op);
  } else {
    s_.records[s_.last_on_stream[stream]].next_on_stream = op;
  }
  s_.last_on_stream[stream] = op;
}

const SegmentCost& EventLoop::CostOfSegment(const BodyRun& run, std::size_t segment) {
  const Body& body = *run.body;
  SegmentCost& sum = s_.segment_costs[run.segment_costs + body.segments[segment].kind];
  if (sum.issue == kNotDone) {
    sum.issue = 0;
    for (std::uint32_t i = body.segments[segment].first; i < SegmentEnd(body, segment); ++i) {
      const Cost& cost = costs_[body.ops[i].shape.value];
      sum.issue += cost.issue;
      sum.streams |= 1u << cost.stream;
      sum.groups |= cost.group == kNone ? 0 : 1u << cost.group;
    }
  }
  return sum;
}

// The last collective of `group` issued before the op at `cursor`, kNone if there is none.
std::uint32_t EventLoop::BeforeInGroup(const StreamCursor& cursor, std::uint32_t group) {
  std::uint32_t end = cursor.next;
  for (std::size_t r = cursor.run + std::size_t{1}; r-- > 0;) {
    const BodyRun& run = s_.runs[r];
    const Body& body = *run.body;
    std::size_t segment = r == cursor.run ? cursor.segment + 1 : body.segments.size();
    while (end > 0) {
      // Whole segments without such a collective are passed over.
      std::uint32_t begin = 0;
      if (segment > 0) {
        --segment;
        begin = body.segments[segment].first;
        if (end == SegmentEnd(body, segment) &&
            (CostOfSegment(run, segment).groups >> group & 1u) == 0) {
          end = begin;
          continue;
        }
      }
      for (; end > begin; --end) {
        if (costs_[body.ops[end - 1].shape.value].group == group) {
          return run.base + end - 1;
        }
      }
    }
    end = r > 0 ? static_cast<std::uint32_t>(s_.runs[r - 1].body->size()) : 0;
  }
  return kNone;
}

// Moves the cursor to the next op of `stream` in its run and returns its index; the body's size
// when there is none.
std::uint32_t EventLoop::FindNext(StreamCursor& cursor, std::size_t stream) {
  const BodyRun& run = s_.runs[cursor.run];
  const Body& body = *run.body;
  const auto size = static_cast<std::uint32_t>(body.size());
  while (cursor.next < size) {
    std::uint32_t end = SegmentEnd(body, cursor.segment);
    if (cursor.next == end) {
      end = SegmentEnd(body, ++cursor.segment);
    }
    if (!body.segments.empty() && cursor.next == body.segments[cursor.segment].first) {
      const SegmentCost& sum = CostOfSegment(run, cursor.segment);
      if ((sum.streams >> stream & 1u) == 0) {
        cursor.host += sum.issue;
        cursor.next = end;
        continue;
      }
    }
    for (; cursor.next < end; ++cursor.next) {
      const Cost& cost = costs_[body.ops[cursor.next].shape.value];
      if (cost.stream == stream) {
        return cursor.next;
      }
      cursor.host += cost.issue;
    }
  }
  return size;
}

// The next op of a stream, with the times at which the host issues it; kNone when there is none.
std::uint32_t EventLoop::PullNext(std::size_t stream) {
  StreamCursor& cursor = s_.cursors[stream];
  while (!cursor.is_done) {
    const bool is_whole_step = cursor.next == 0 && s_.runs[cursor.run].kind == BodyKind::kStep;
    const std::uint32_t i = FindNext(cursor, stream);
    BodyRun& run = s_.runs[cursor.run];
    if (i < run.body->size()) {
      const Cost& cost = costs_[run.body->ops[i].shape.value];
      EventRecord& record = s_.records[run.base + i];
      record.issued = cursor.host + cost.first;
      cursor.host += cost.issue;
      record.issue_end = cursor.host;
      record.before_in_group = cost.group == kNone ? kNone : BeforeInGroup(cursor, cost.group);
      cursor.next = i + 1;
      return run.base + i;
    }
    run.host_end = cursor.host;
    run.totals.host_issue = run.host_end - run.host_begin;
    cursor.is_done = is_whole_step;  // later steps have nothing for this stream either
    if (cursor.is_done) {
      return kNone;
    }
    if (cursor.run + 1 == s_.runs.size() && !BeginNextBody()) {
      cursor.is_done = true;
      steps_are_used_up_ = true;
      return kNone;
    }
    ++cursor.run;
    cursor.next = 0;
    cursor.segment = 0;
    cursor.host = s_.runs[cursor.run].host_begin;
  }
  return kNone;
}

void EventLoop::PullFirstOps() {
  s_.cursors = {};
  std::uint32_t used = 0;
  for (const Cost& cost : costs_) {
    used |= 1u << cost.stream;
  }
  for (std::size_t stream = 1; stream < kStreamCount; ++stream) {
    if ((used >> stream & 1u) != 0) {
      SetHead(stream, PullNext(stream));
    }
  }
}

}  // namespace shardwright::internal
