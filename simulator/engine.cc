// The loop over events, and the end of it: when two steps in a row differ by a shift in time only.
//
// Example: steps that take 12, 10, 10 ms. The first one fills the pipelines. In the third every
// device op ends exactly 10 ms after the same op of the second, so the period is 10 ms and three
// steps were simulated. If no two steps agree within max_steps (8), the answer is the mean of the
// later half.
//
// Times are integers in picoseconds. With contention, durations are rounded up from fractions, so a
// shift may differ by a billionth of the period.

#include "simulator/engine.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "simulator/internal/engine_state.h"
#include "simulator/internal/event_loop.h"

namespace shardwright {

struct EngineWorkspace::State : internal::EventState {};

EngineWorkspace::EngineWorkspace() : state_(std::make_unique<State>()) {}
EngineWorkspace::~EngineWorkspace() = default;
EngineWorkspace::EngineWorkspace(EngineWorkspace&&) noexcept = default;
EngineWorkspace& EngineWorkspace::operator=(EngineWorkspace&&) noexcept = default;

SimTime StepTiming::ExposedCommunication() const {
  const auto idle = [&](Stream s) { return compute_idle[static_cast<std::size_t>(s)]; };
  return idle(Stream::kGather) + idle(Stream::kReduce) + idle(Stream::kReplicate) +
         collectives_on_compute;
}

namespace internal {

void BuildCosts(const Program& program, const PriceTable& prices, std::vector<Cost>& costs) {
  SW_CHECK(prices.prices.size() == program.shapes.size(), "one price per shape is needed");
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

// The first bound is quick and almost always enough.
void CheckRange(const Program& program, const std::vector<Cost>& costs,
                const EngineOptions& options, std::size_t ranks) {
  const double range = 9e18 / static_cast<double>(ranks);
  double longest = 0;
  const auto cost_of = [](const Cost& c) {
    return static_cast<double>(c.duration) + static_cast<double>(c.issue) +
           static_cast<double>(c.first);
  };
  for (const Cost& cost : costs) {
    longest = std::max(longest, cost_of(cost));
  }
  const auto steps = static_cast<double>(options.max_steps) + 1;
  const auto ops = static_cast<double>(program.init.size()) +
                   steps * static_cast<double>(program.step.size() + program.warmup.size());
  if (longest * ops < range) {
    return;
  }
  double sum = 0;
  for (const Body* body : {&program.init, &program.warmup, &program.step}) {
    for (const Op& op : body->ops) {
      sum += (body == &program.init ? 1 : steps) * cost_of(costs[op.shape.value]);
    }
  }
  if (!(sum < range)) {
    throw InputError(
        "cluster and profile", "rates that let a step take weeks",
        "rates with which " + std::to_string(options.max_steps) + " steps take less than 100 days");
  }
}

}  // namespace internal

namespace {

using internal::BodyRun;
using internal::Cost;
using internal::EventLoop;

// Takes over the results of bodies that are complete, until two steps differ by a shift in time.
class Steps {
 public:
  Steps(const EngineOptions& options, const EventLoop& loop, const std::vector<BodyRun>& runs)
      : options_(options), loop_(loop), runs_(runs) {}

  // True when the simulation can stop.
  bool Collect() {
    while (!is_over_ && collected_ < runs_.size() && runs_[collected_].IsComplete()) {
      const BodyRun& run = runs_[collected_++];
      const std::int64_t front = std::max({front_, run.last_end, run.host_end});
      if (run.kind == BodyKind::kInit) {
        result_.init = SimTime(front);
      } else {
        TakeStep(run, front - front_);
      }
      front_ = front;
    }
    return is_over_;
  }
  [[nodiscard]] const EngineResult& result() const { return result_; }

 private:
  void TakeStep(const BodyRun& run, std::int64_t time) {
    result_.steps = static_cast<int>(run.step) + 1;
    result_.simulated_ops = loop_.finished();
    result_.steady = run.totals;
    result_.steady.time = SimTime(time);
    if (run.step == 0) {
      result_.first = result_.steady;
    }
    late_time_ += result_.steps > options_.max_steps / 2 ? time : 0;
    const BodyRun& before = runs_[collected_ - 2];
    if (before.kind == BodyKind::kStep && run.kind == BodyKind::kStep &&
        AreSteady(before, run, time)) {
      result_.is_steady = is_over_ = true;
    } else if (result_.steps == options_.max_steps) {
      result_.steady.time = SimTime(late_time_ / (options_.max_steps - options_.max_steps / 2));
      is_over_ = true;
    }
  }

  // Two runs of the step differ by a shift only: every device op ends `period` later, up to what
  // the rounding of contended durations allows, and the host keeps pace or is ahead anyway. A host
  // that gains changes what compute waited for, until it is ahead of all gaps; if steps are left,
  // those decide.
  [[nodiscard]] bool AreSteady(const BodyRun& a, const BodyRun& b, std::int64_t period) const {
    const std::int64_t tolerance = options_.contention ? period / 1'000'000'000 : 0;
    if (b.host_end - a.host_end > period + tolerance) {
      return false;
    }
    constexpr auto kHost = static_cast<std::size_t>(Stream::kHost);
    if (b.totals.compute_idle[kHost] < a.totals.compute_idle[kHost] - SimTime(tolerance) &&
        b.step + 1 < static_cast<std::uint32_t>(options_.max_steps)) {
      return false;
    }
    for (std::uint32_t i = 0; i < b.body->size(); ++i) {
      const std::int64_t shift = loop_.RecordOf(b.base + i).end - loop_.RecordOf(a.base + i).end;
      if (!loop_.CostOf(b, b.base + i).on_host &&
          (shift > period + tolerance || shift < period - tolerance)) {
        return false;
      }
    }
    return true;
  }

  const EngineOptions& options_;
  const EventLoop& loop_;
  const std::vector<BodyRun>& runs_;
  EngineResult result_;
  std::size_t collected_ = 0;  // runs whose results are in
  std::int64_t front_ = 0;     // when all of them were complete
  std::int64_t late_time_ = 0;
  bool is_over_ = false;
};

EngineResult Run(const Program& program, const PriceTable& prices, const EngineOptions& options,
                 EngineWorkspace& workspace, std::vector<Span>* spans) {
  internal::EventState& state = workspace.state();
  internal::BuildCosts(program, prices, state.costs);
  internal::CheckRange(program, state.costs, options, 1);
  EventLoop loop(program, prices, options, state);
  Steps steps(options, loop, state.runs);
  while (!steps.Collect()) {
    loop.StartDue();
    loop.UpdateSpeeds();
    const std::int64_t next = loop.NextEvent();
    SW_CHECK(next != internal::kNotDone, "the program waits for itself; Verify must reject it");
    loop.FinishDue(next);
  }
  if (spans != nullptr) {
    const auto last = static_cast<std::uint32_t>(steps.result().steps - 1);
    loop.AppendSpans(*spans, [&](const BodyRun& run) { return run.step == 0 || run.step == last; });
  }
  return steps.result();
}

}  // namespace

EngineResult RunEngine(const Program& program, const PriceTable& prices,
                       const EngineOptions& options, EngineWorkspace& workspace) {
  return Run(program, prices, options, workspace, nullptr);
}

EngineResult RunEngineWithSpans(const Program& program, const PriceTable& prices,
                                const EngineOptions& options, EngineWorkspace& workspace,
                                std::vector<Span>& spans) {
  return Run(program, prices, options, workspace, &spans);
}

}  // namespace shardwright
