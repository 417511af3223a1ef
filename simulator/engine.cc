#include "simulator/engine.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "simulator/internal/engine_linear.h"
#include "simulator/internal/engine_state.h"
#include "simulator/internal/workspace_state.h"

namespace shardwright {

namespace internal {

void BuildCosts(const Program& program, const PriceTable& prices, std::vector<Cost>& costs) {
  SW_CHECK(prices.prices.size() == program.shapes.size(), "one price per shape is needed");
  SW_CHECK(program.groups.size() <= kMaxGroups, "more groups than the engine has clocks for");
  costs.resize(program.shapes.size());
  for (std::size_t i = 0; i < costs.size(); ++i) {
    const OpShape& shape = program.shapes[i];
    const Price& price = prices.prices[i];
    const OpCodeInfo& info = InfoOf(shape.code);
    Cost& cost = costs[i];
    cost.duration = price.duration.value;
    cost.on_host = info.runs_on_host;
    cost.issue = info.runs_on_host ? 0 : price.issue.value;
    cost.first = price.first_launch.value;
    if (info.runs_on_host) {
      cost.first = shape.code == OpCode::kHostWait ? prices.wake_up.value : 0;
    }
    cost.tail = price.tail.value;
    cost.group = info.is_collective ? shape.group.value : kNone;
    cost.stream = static_cast<std::uint8_t>(info.runs_on_host ? Stream::kHost
                                            : prices.in_turn  ? Stream::kCompute
                                                              : shape.stream);
    cost.contention_class = price.contention_class;
    SW_CHECK(cost.group == kNone || cost.group < program.groups.size(), "collective without group");
  }
}

bool HasHostOps(const std::vector<Cost>& costs) {
  return std::any_of(costs.begin(), costs.end(), [](const Cost& cost) { return cost.on_host; });
}

std::int64_t Clock::Front() const {
  return std::max(host, *std::max_element(stream.begin(), stream.end()));
}

void Add(Totals& totals, const Totals& more) {
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    totals.busy[s] += more.busy[s];
    totals.compute_idle[s] += more.compute_idle[s];
  }
  totals.collectives_on_compute += more.collectives_on_compute;
  totals.host_blocked += more.host_blocked;
  totals.host_issue += more.host_issue;
}

void AddScaled(Totals& totals, const Totals& before, const Totals& after, std::int64_t count) {
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    totals.busy[s] += count * (after.busy[s] - before.busy[s]);
    totals.compute_idle[s] += count * (after.compute_idle[s] - before.compute_idle[s]);
  }
  totals.collectives_on_compute +=
      count * (after.collectives_on_compute - before.collectives_on_compute);
  totals.host_blocked += count * (after.host_blocked - before.host_blocked);
  totals.host_issue += count * (after.host_issue - before.host_issue);
}

void AddScaled(Clock& clock, const Clock& before, const Clock& after, std::int64_t count) {
  clock.host += count * (after.host - before.host);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    clock.stream[s] += count * (after.stream[s] - before.stream[s]);
  }
  for (std::size_t g = 0; g < kMaxGroups; ++g) {
    clock.group[g] += count * (after.group[g] - before.group[g]);
  }
}

StepTiming ToStepTiming(const Totals& before, const Totals& after, std::int64_t time) {
  StepTiming timing;
  timing.time = SimTime(time);
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    timing.busy[s] = SimTime(after.busy[s] - before.busy[s]);
    timing.compute_idle[s] = SimTime(after.compute_idle[s] - before.compute_idle[s]);
  }
  timing.collectives_on_compute =
      SimTime(after.collectives_on_compute - before.collectives_on_compute);
  timing.host_blocked = SimTime(after.host_blocked - before.host_blocked);
  timing.host_issue = SimTime(after.host_issue - before.host_issue);
  return timing;
}

void ChargeGap(Totals& totals, const Gap& gap, std::uint8_t stream) {
  const std::int64_t issue_wait = std::min(gap.start, gap.issued) - gap.previous_end;
  if (issue_wait > 0) {
    totals.compute_idle[static_cast<std::size_t>(Stream::kHost)] += issue_wait;
  }
  const std::int64_t edge_wait = gap.start - std::max(gap.previous_end, gap.issued);
  if (edge_wait > 0) {
    totals.compute_idle[stream] += edge_wait;
  }
}

}  // namespace internal

EngineWorkspace::EngineWorkspace() : state_(std::make_unique<State>()) {}
EngineWorkspace::~EngineWorkspace() = default;
EngineWorkspace::EngineWorkspace(EngineWorkspace&&) noexcept = default;
EngineWorkspace& EngineWorkspace::operator=(EngineWorkspace&&) noexcept = default;

SimTime StepTiming::ExposedCommunication() const {
  const auto idle = [&](Stream s) { return compute_idle[static_cast<std::size_t>(s)]; };
  return idle(Stream::kGather) + idle(Stream::kReduce) + idle(Stream::kReplicate) +
         collectives_on_compute;
}

namespace {

// Times must stay inside SimTime, +-106 days. The first bound is quick and almost always enough.
void CheckRange(const Program& program, const std::vector<internal::Cost>& costs,
                const EngineOptions& options) {
  constexpr double kRange = 9e18;
  double longest = 0;
  const auto cost_of = [](const internal::Cost& c) {
    return static_cast<double>(c.duration) + static_cast<double>(c.issue) +
           static_cast<double>(c.first);
  };
  for (const internal::Cost& cost : costs) {
    longest = std::max(longest, cost_of(cost));
  }
  const auto steps = static_cast<double>(options.max_steps) + 1;
  const auto ops = static_cast<double>(program.init.size()) +
                   steps * static_cast<double>(program.step.size() + program.warmup.size());
  if (longest * ops < kRange) {
    return;
  }
  double sum = 0;
  for (const Body* body : {&program.init, &program.warmup, &program.step}) {
    for (const Op& op : body->ops) {
      sum += (body == &program.init ? 1 : steps) * cost_of(costs[op.shape.value]);
    }
  }
  if (!(sum < kRange)) {
    throw InputError(
        "cluster and profile", "rates that let a step take weeks",
        "rates with which " + std::to_string(options.max_steps) + " steps take less than 100 days");
  }
}

bool NeedsEvents(const EngineOptions& options) {
  return options.contention || options.force_events ||
         (options.stalls != nullptr && !options.stalls->empty());
}

}  // namespace

EngineResult RunEngine(const Program& program, const PriceTable& prices,
                       const EngineOptions& options, EngineWorkspace& workspace) {
  EngineWorkspace::State& state = workspace.state();
  internal::BuildCosts(program, prices, state.costs);
  CheckRange(program, state.costs, options);
  Repetitions found;
  if (options.periodic && options.repetitions == nullptr) {
    found = FindRepetitions(program);
  }
  const Repetitions& cuts =
      options.periodic && options.repetitions != nullptr ? *options.repetitions : found;
  if (NeedsEvents(options)) {
    return internal::RunEvents(program, cuts, prices, options, state, nullptr);
  }
  // The event loop remembers what it has met, which pays as soon as there are micro-batches. It
  // finds no state that recurs where the host takes many steps to lose or to gain its lead.
  if (options.periodic && program.micro_batch_count > 1 && !internal::HasHostOps(state.costs)) {
    EngineOptions few_steps = options;
    few_steps.max_steps = std::min(options.max_steps, 4);
    const EngineResult result =
        internal::RunEvents(program, cuts, prices, few_steps, state, nullptr);
    if (state.events.recurs) {
      return result;
    }
  }
  return internal::RunLinear(program, cuts, options, state, nullptr);
}

EngineResult RunEngineWithSpans(const Program& program, const PriceTable& prices,
                                const EngineOptions& options, EngineWorkspace& workspace,
                                std::vector<Span>& spans) {
  EngineOptions exact = options;
  exact.periodic = false;
  EngineWorkspace::State& state = workspace.state();
  internal::BuildCosts(program, prices, state.costs);
  CheckRange(program, state.costs, options);
  if (NeedsEvents(options)) {
    return internal::RunEvents(program, {}, prices, exact, state, &spans);
  }
  return internal::RunLinear(program, {}, exact, state, &spans);
}

}  // namespace shardwright
