#include "analysis/compare.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "analysis/internal/comparison_parts.h"
#include "core/error.h"
#include "core/text.h"
#include "traces/check.h"

namespace shardwright {
namespace {

// Means over the steps of one trace that count.
struct Means {
  StepBreakdown parts;
  std::vector<double> op_seconds;     // by op of the step body
  std::vector<double> issue_seconds;  // likewise: host time to issue it
  std::array<double, kOpClassCount> class_seconds{};
  std::int64_t steps = 0;
  double shortest = 0, longest = 0;
  double on_cores = 0;      // seconds of ops on cores
  double on_core_time = 0;  // of these, with a core
};

// Ops of a prediction have their cores for themselves.
constexpr double kLeastCoreShare = 0.8;

// Of a slow run whose ops waited for cores. Empty: they did not.
std::string BusyMachine(const Means& measured, double gap, double core_share) {
  const double share = measured.on_core_time / std::max(measured.on_cores, 1e-12);
  return measured.on_cores == 0 || share > kLeastCoreShare * core_share || gap < 1 - kLeastCoreShare
             ? ""
             : "ops had a core " + Fixed(100 * share, "%.0f %%") +
                   " of their time: other processes held this machine. Measure again when it is "
                   "idle; calibrating to this run does not help.";
}

// Steps that count: those with a recorded step before; when there are none, each rank's last one.
std::vector<std::size_t> MeasuredSteps(const std::vector<RecordedStep>& steps) {
  std::vector<std::size_t> chosen, last;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].previous != RecordedStep::kNoStep) {
      chosen.push_back(i);
    }
  }
  for (std::size_t i = 0; chosen.empty() && i < steps.size(); ++i) {
    if (i + 1 == steps.size() || steps[i + 1].rank != steps[i].rank) {
      last.push_back(i);
    }
  }
  return chosen.empty() ? last : chosen;
}

void AddSpans(const Program& program, const Trace& trace, const RecordedStep& step, Means& r) {
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const Span& span = trace.spans[step.first + i];
    const OpClass op_class = ClassOf(program, program.ShapeOf(program.step.ops[i]));
    const double seconds = ToSeconds(span.end - span.start).value;
    r.op_seconds[i] += seconds;
    r.class_seconds[static_cast<std::size_t>(op_class)] += seconds;
    r.issue_seconds[i] += ToSeconds(span.issue_end - span.issue_begin).value;
    if (span.stream == Stream::kCompute && span.cpu > SimTime(0)) {
      r.on_cores += seconds;
      r.on_core_time += std::min(seconds, ToSeconds(span.cpu).value);
    }
  }
}

Means Summarize(const Program& program, const Trace& trace, const std::vector<RecordedStep>& steps,
                const std::vector<std::size_t>& chosen, std::optional<SimTime> period) {
  Means r;
  r.op_seconds.resize(program.step.size());
  r.issue_seconds.resize(program.step.size());
  r.steps = static_cast<std::int64_t>(chosen.size());
  for (const std::size_t index : chosen) {
    const StepBreakdown parts = BreakDown(program, trace, steps, index, period);
    r.shortest = index == chosen.front() ? parts.period : std::min(r.shortest, parts.period);
    r.longest = std::max(r.longest, parts.period);
    Add(parts, r.parts);
    AddSpans(program, trace, steps[index], r);
  }
  const auto count = static_cast<double>(r.steps);
  Divide(r.parts, count);
  for (auto* list : {&r.op_seconds, &r.issue_seconds}) {
    for (double& seconds : *list) {
      seconds /= count;
    }
  }
  for (double& seconds : r.class_seconds) {
    seconds /= count;
  }
  return r;
}

void FindCalibrations(const CompareInput& input, const Means& simulated, const Means& measured,
                      Comparison& result) {
  internal::Recalibration again(
      {input.program, input.prices, input.engine},
      [&](const OpShape& shape, std::span<const double> factors) {
        return factors[static_cast<std::size_t>(ClassOf(input.program, shape))];
      });
  std::array<double, kOpClassCount> none;
  none.fill(1.0);
  std::array<double, kOpClassCount> all = none;
  for (std::size_t i = 0; i < kOpClassCount; ++i) {
    const auto op_class = static_cast<OpClass>(i);
    if (op_class == OpClass::kControl || simulated.class_seconds[i] <= 0 ||
        measured.class_seconds[i] <= 0) {
      continue;
    }
    all[i] = measured.class_seconds[i] / simulated.class_seconds[i];
    std::array<double, kOpClassCount> one = none;
    one[i] = all[i];
    result.calibrations.push_back({std::string(NameOf(op_class)), internal::FieldsOf(op_class),
                                   all[i], again.StepTime(one, 1.0)});
  }
  const auto sum = [](const std::vector<double>& list) {
    return std::accumulate(list.begin(), list.end(), 0.0);
  };
  double issue = 1.0;
  if (sum(simulated.issue_seconds) > 0 && sum(measured.issue_seconds) > 0) {
    issue = sum(measured.issue_seconds) / sum(simulated.issue_seconds);
    result.calibrations.push_back(
        {"host issue", "host.kernel_launch, host.op_issue, host.collective_issue, host.copy_issue",
         issue, again.StepTime(none, issue)});
  }
  result.calibrated_step = again.StepTime(all, issue);
  internal::SortCalibrations(result);
}

// Spans that belong to complete bodies: all ops, once each, in issue order.
std::int64_t CountMatched(const Program& program, const Trace& trace) {
  std::int64_t matched = 0;
  std::size_t i = 0;
  while (i < trace.spans.size()) {
    const Span& head = trace.spans[i];
    const Body& body = BodyOf(program, head.body);
    std::size_t end = i;
    bool in_order = true;
    for (; end < trace.spans.size() && trace.spans[end].rank == head.rank &&
           trace.spans[end].step == head.step && trace.spans[end].body == head.body;
         ++end) {
      in_order = in_order && trace.spans[end].op == OpId(end - i);
    }
    matched += in_order && end - i == body.size() ? static_cast<std::int64_t>(end - i) : 0;
    i = end;
  }
  return matched;
}

}  // namespace

double CoreShare(const Cluster& cluster) {
  const double cores = cluster.SharedCores();
  return cores > 0 ? std::min(1.0, cores / static_cast<double>(cluster.RanksOnCores())) : 1.0;
}

double Comparison::gap() const {
  return measured_step.value / simulated_step.value - 1;
}

Comparison Compare(const CompareInput& input) {
  const Program& program = input.program;
  const std::vector<RecordedStep> simulated_steps = FindRecordedSteps(program, input.simulated);
  const std::vector<RecordedStep> measured_steps = FindRecordedSteps(program, input.measured);
  for (const auto* steps : {&simulated_steps, &measured_steps}) {
    if (steps->empty()) {
      throw InputError(steps == &simulated_steps ? "simulated trace" : "measured trace",
                       "no complete step", "all ops of at least one step");
    }
  }
  const Means simulated = Summarize(program, input.simulated, simulated_steps,
                                    {simulated_steps.size() - 1}, input.simulated_period);
  const Means measured = Summarize(program, input.measured, measured_steps,
                                   MeasuredSteps(measured_steps), std::nullopt);
  Comparison result;
  result.simulated_step = Seconds(simulated.parts.period);
  result.measured_step = Seconds(measured.parts.period);
  result.measured_shortest = Seconds(measured.shortest);
  result.measured_longest = Seconds(measured.longest);
  result.measured_steps = measured.steps;
  for (std::size_t i = 0; i < measured_steps.size(); ++i) {
    result.ranks += i == 0 || measured_steps[i].rank != measured_steps[i - 1].rank ? 1 : 0;
  }
  result.spans = static_cast<std::int64_t>(input.measured.spans.size());
  result.matched = CountMatched(program, input.measured);
  result.findings = CheckTrace(program, input.measured);
  result.parts = internal::PartsOf(simulated.parts, measured.parts);
  std::array<std::int64_t, kOpClassCount> counts{};
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    ++counts[static_cast<std::size_t>(ClassOf(program, program.ShapeOf(program.step.ops[i])))];
    result.ops.push_back(
        {OpId(i), Seconds(simulated.op_seconds[i]), Seconds(measured.op_seconds[i])});
  }
  internal::SortByDifference(result.ops);
  for (std::size_t i = 0; i < kOpClassCount; ++i) {
    if (counts[i] > 0) {
      result.classes.push_back({static_cast<OpClass>(i), counts[i],
                                Seconds(simulated.class_seconds[i]),
                                Seconds(measured.class_seconds[i])});
    }
  }
  internal::FindPeak(input.simulated, result.memory.simulated_peak, result.memory.simulated);
  internal::FindPeak(input.measured, result.memory.measured_peak, result.memory.measured);
  FindCalibrations(input, simulated, measured, result);
  if (const std::string busy = BusyMachine(measured, result.gap(), input.core_share);
      !busy.empty()) {
    result.notes.push_back(busy);
  }
  return result;
}

}  // namespace shardwright
