// The engine without contention. A body run is one pass over its ops in issue order; see engine.h.

#include "simulator/internal/engine_linear.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "simulator/internal/workspace_state.h"

namespace shardwright::internal {
namespace {

// When the target of an edge ended.
std::int64_t EndOf(const LinearState& state, Edge edge) {
  return edge.is_carried() ? state.slots[edge.slot()] : state.times.end[edge.value];
}

std::uint8_t StreamOf(const LinearState& state, Edge edge) {
  return edge.is_carried() ? state.slot_streams[edge.slot()]
                           : state.costs[state.body->ops[edge.value].shape.value].stream;
}

// The stream of the first edge that ended at `time`; the op's own stream when the queue of its
// communicator was last.
std::uint8_t BindingStream(const LinearState& state, std::uint32_t op, std::int64_t time) {
  for (const Edge edge : state.body->EdgesOf(OpId(op))) {
    if (EndOf(state, edge) == time) {
      return StreamOf(state, edge);
    }
  }
  return kCompute;
}

void RunHostOp(LinearState& state, std::uint32_t i, const Cost& cost, std::int64_t ready) {
  std::int64_t& host = state.clock.host;
  // No wake-up where nothing had to be waited for.
  const std::int64_t start = std::max(host, ready + cost.first);
  const std::int64_t end = start + cost.duration;
  state.times.records[i] = {host, start, host, 0};
  state.times.end[i] = end;
  state.totals.host_blocked += start - host;
  state.totals.busy[static_cast<std::size_t>(Stream::kHost)] += cost.duration;
  host = end;
}

}  // namespace

void AdvanceLinear(LinearState& state, std::uint32_t begin, std::uint32_t end) {
  if (begin == end) {
    return;
  }
  const Body& body = *state.body;
  const Op* const ops = body.ops.data();
  const Edge* const edges = body.edges.data();
  const Cost* const costs = state.costs.data();
  const std::int64_t* const slots = state.slots.data();
  std::int64_t* const ends = state.times.end.data();
  OpRecord* const records = state.times.records.data();
  Clock& clock = state.clock;
  Totals& totals = state.totals;
  const auto last = static_cast<std::uint32_t>(body.size() - 1);
  const auto edge_count = static_cast<std::uint32_t>(body.edges.size());
  for (std::uint32_t i = begin; i < end; ++i) {
    const Cost& cost = costs[ops[i].shape.value];
    const std::uint32_t edge_end = i < last ? ops[i + 1].edge_begin : edge_count;
    std::int64_t ready = kNever;
    for (std::uint32_t e = ops[i].edge_begin; e < edge_end; ++e) {
      const Edge edge = edges[e];
      ready = std::max(ready, edge.is_carried() ? slots[edge.slot()] : ends[edge.value]);
    }
    if (cost.on_host) {
      RunHostOp(state, i, cost, ready);
      continue;
    }
    const std::int64_t issued = clock.host + cost.first;
    clock.host += cost.issue;
    totals.host_issue += cost.issue;
    std::int64_t& stream = clock.stream[cost.stream];
    const std::int64_t stream_free = stream;
    std::int64_t start = std::max({issued, stream_free, ready});
    std::int64_t group_free = 0;
    if (cost.group != kNone) {
      group_free = clock.group[cost.group];
      start = std::max(start, group_free);
    }
    const std::int64_t finish = std::max(start + cost.duration, clock.host + cost.tail);
    if (cost.group != kNone) {
      clock.group[cost.group] = finish;
      if (cost.stream == kCompute) {
        totals.collectives_on_compute += finish - start;
      }
    }
    if (cost.stream == kCompute && start > stream_free) {
      ChargeGap(totals, {stream_free, issued, start}, BindingStream(state, i, start));
    }
    totals.busy[cost.stream] += finish - start;
    stream = finish;
    ends[i] = finish;
    records[i] = {issued, start, stream_free, group_free};
  }
  state.times.simulated.push_back({begin, end});
  state.simulated_ops += end - begin;
}

namespace {

// Takes over the carry slots that the body sets.
void SetSlots(LinearState& state) {
  const Body& body = *state.body;
  for (std::size_t s = 0; s < body.carries.size(); ++s) {
    const OpId op = body.carries[s];
    if (op.valid()) {
      state.slots[s] = state.times.end[op.value];
      state.slot_streams[s] = state.costs[body.ops[op.value].shape.value].stream;
    }
  }
}

// Runs one body after the others. The times of the body before are kept in previous_times.
void RunNext(LinearState& state, const Body& body, const Repetition& cuts) {
  state.body = &body;
  state.repeats = &cuts.repeats;
  std::swap(state.times, state.previous_times);
  if (state.times.end.size() < body.size()) {
    state.times.end.resize(body.size());
    state.times.records.resize(body.size());
  }
  state.times.simulated.clear();
  state.previous_slots.assign(state.slots.begin(), state.slots.end());
  RunBodyLinear(state);
  SetSlots(state);
}

void AppendSpans(const LinearState& state, const Program& program, std::uint32_t step,
                 std::vector<Span>& spans) {
  const Body& body = *state.body;
  for (std::uint32_t i = 0; i < body.size(); ++i) {
    const Cost& cost = state.costs[body.ops[i].shape.value];
    const OpRecord& record = state.times.records[i];
    Span span;
    span.step = step;
    span.body = &body == &program.init     ? BodyKind::kInit
                : &body == &program.warmup ? BodyKind::kWarmup
                                           : BodyKind::kStep;
    span.stream = static_cast<Stream>(cost.stream);
    span.op = OpId(i);
    span.issued = SimTime(record.issued);
    span.issue_begin = SimTime(cost.on_host ? record.issued : record.issued - cost.first);
    span.issue_end = SimTime(cost.on_host ? record.issued : span.issue_begin.value + cost.issue);
    std::int64_t ready = record.stream_free;
    for (const Edge edge : body.EdgesOf(OpId(i))) {
      ready = std::max(ready, edge.is_carried() ? state.previous_slots[edge.slot()]
                                                : state.times.end[edge.value]);
    }
    span.ready = SimTime(ready);
    span.arrival = SimTime(record.start);
    span.start = SimTime(record.start);
    span.end = SimTime(state.times.end[i]);
    spans.push_back(span);
  }
}

// Compares the step just run with the one before; see LinearCopies.
std::int64_t LinearSteps(const LinearState& state, const Clock& before) {
  CopyPair pair;
  pair.a = &state.previous_times;
  pair.b = &state.times;
  pair.a_end = state.previous_times.simulated.size();
  pair.b_end = state.times.simulated.size();
  pair.before = &before;
  pair.after = &state.clock;
  pair.slots_before = &state.previous_slots;
  pair.slots_after = &state.slots;
  return LinearCopies(state, pair, kForever);
}

// The period of a regime that lasts: that of the slowest stream.
std::int64_t PeriodOf(const Clock& before, const Clock& after) {
  std::int64_t period = after.host - before.host;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    period = std::max(period, after.stream[s] - before.stream[s]);
  }
  return period;
}

// What stays the same for this many steps counts as steady: a million, or what SimTime can hold.
std::int64_t LastingSteps(std::int64_t period) {
  constexpr std::int64_t kMany = 1'000'000;
  constexpr std::int64_t kRange = std::int64_t{1} << 62;
  return std::min(kMany, kRange / 4 / std::max<std::int64_t>(period, 1));
}

// Skips `copies` steps like the one just run.
void JumpAhead(LinearState& state, const Clock& before, std::int64_t copies) {
  const Clock after = state.clock;
  AddScaled(state.clock, before, after, copies);
  for (std::size_t s = 0; s < state.slots.size(); ++s) {
    state.slots[s] += copies * (state.slots[s] - state.previous_slots[s]);
  }
}

}  // namespace

EngineResult RunLinear(const Program& program, const Repetitions& cuts,
                       const EngineOptions& options, EngineWorkspace::State& workspace,
                       std::vector<Span>* spans) {
  LinearState& state = workspace.linear;
  state.program = &program;
  state.costs.assign(workspace.costs.begin(), workspace.costs.end());
  state.clock = Clock();
  state.totals = Totals();
  state.simulated_ops = 0;
  state.slots.assign(program.carry_slot_count, kNever);
  state.slot_streams.assign(program.carry_slot_count, kCompute);

  EngineResult result;
  RunNext(state, program.init, cuts.init);
  if (spans != nullptr) {
    AppendSpans(state, program, 0, *spans);
  }
  std::int64_t front = state.clock.Front();
  result.init = SimTime(front);

  std::int64_t late_time = 0;  // of the steps of the second half
  int comparable_steps = 0;    // runs of `step` in a row without a jump in time between them
  std::size_t span_begin = 0;
  for (int step = 0; step < options.max_steps; ++step) {
    const bool is_first = step == 0;
    const bool is_warmup = is_first && !program.warmup.ops.empty();
    const Clock before = state.clock;
    const Totals totals_before = state.totals;
    RunNext(state, is_warmup ? program.warmup : program.step, is_warmup ? cuts.warmup : cuts.step);
    comparable_steps += is_warmup ? 0 : 1;
    const std::int64_t time = state.clock.Front() - front;
    front = state.clock.Front();
    result.steps = step + 1;
    result.simulated_ops = state.simulated_ops;
    result.steady = ToStepTiming(totals_before, state.totals, time);
    if (is_first) {
      result.first = result.steady;
    }
    late_time += step >= options.max_steps / 2 ? time : 0;
    if (spans != nullptr) {
      if (step >= 2) {
        spans->resize(span_begin);  // keep the first and the last step only
      }
      span_begin = spans->size();
      AppendSpans(state, program, static_cast<std::uint32_t>(step), *spans);
    }
    const std::int64_t copies = comparable_steps >= 2 ? LinearSteps(state, before) : 0;
    const std::int64_t period = PeriodOf(before, state.clock);
    if (copies >= LastingSteps(period)) {
      result.is_steady = true;
      result.steady.time = SimTime(period);
      return result;
    }
    if (copies > 0) {
      // Something still catches up, such as a host that had a lead: go on from where it has.
      JumpAhead(state, before, copies);
      front = state.clock.Front();
      comparable_steps = 0;
    }
  }
  const int late_steps = options.max_steps - options.max_steps / 2;
  result.steady.time = SimTime(late_time / late_steps);
  return result;
}

}  // namespace shardwright::internal
