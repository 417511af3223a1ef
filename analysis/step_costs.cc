#include "analysis/step_costs.h"

#include <map>
#include <numeric>
#include <utility>

#include "analysis/recording_steps.h"
#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// Sums over steps, which Means() divides.
class Sums {
 public:
  UnitCosts& Unit(const std::string& name) {
    const auto [it, is_new] = rows_.emplace(name, costs_.units.size());
    if (is_new) {
      costs_.units.emplace_back();
      costs_.units.back().unit = name;
    }
    return costs_.units[it->second];
  }

  void AddStep(const StepBreakdown& parts) {
    Add(parts, costs_.parts);
    costs_.shortest = costs_.steps == 0 ? parts.period : std::min(costs_.shortest, parts.period);
    costs_.longest = std::max(costs_.longest, parts.period);
    ++costs_.steps;
  }

  StepCosts& costs() { return costs_; }

  StepCosts Means() {
    SW_CHECK(costs_.steps > 0, "no step to take means of");
    Divide(costs_.parts, static_cast<double>(costs_.steps));
    const double share = 1.0 / static_cast<double>(costs_.steps);
    for (double* value :
         {&costs_.copies_exposed, &costs_.copies_busy, &costs_.kernels, &costs_.data_loading,
          &costs_.host_updates, &costs_.before_first, &costs_.compiled_regions}) {
      *value *= share;
    }
    for (UnitCosts& unit : costs_.units) {
      for (double* value :
           {&unit.gathers, &unit.backward_gathers, &unit.late_gathers, &unit.reductions,
            &unit.all_reductions, &unit.gather_busy, &unit.reduce_busy, &unit.forward_exposed,
            &unit.backward_exposed, &unit.late_exposed, &unit.reduce_exposed}) {
        *value *= share;
      }
    }
    return std::move(costs_);
  }

 private:
  StepCosts costs_;
  std::map<std::string, std::size_t> rows_;
};

// One collective of a unit, whoever recorded it.
struct Collective {
  OpCode code = OpCode::kAllGather;
  bool in_backward = false;
  Bytes bytes;
  double seconds = 0;
};

void Count(const Collective& collective, UnitCosts& unit) {
  if (collective.code == OpCode::kAllGather) {
    ++unit.gathers;
    unit.backward_gathers += collective.in_backward ? 1 : 0;
    unit.gathered = std::max(unit.gathered, collective.bytes);
    unit.gather_busy += collective.seconds;
  } else {
    ++(collective.code == OpCode::kReduceScatter ? unit.reductions : unit.all_reductions);
    unit.reduce_busy += collective.seconds;
  }
}

void Wait(const Collective& collective, double seconds, bool is_late, UnitCosts& unit) {
  if (collective.code != OpCode::kAllGather) {
    unit.reduce_exposed += seconds;
    return;
  }
  (collective.in_backward ? unit.backward_exposed : unit.forward_exposed) += seconds;
  unit.late_gathers += is_late ? 1 : 0;
  unit.late_exposed += is_late ? seconds : 0;
}

// What FSDP does not ask for has no unit: sums of losses, exchanges of experts.
bool IsOfUnit(OpCode code) {
  return code == OpCode::kAllGather || code == OpCode::kReduceScatter || code == OpCode::kAllReduce;
}

Collective CollectiveOf(const Activity& activity) {
  return {activity.collective, activity.phase == Phase::kBackward, activity.bytes,
          ToSeconds(activity.end - activity.start).value};
}

std::string UnitOf(const ProfilerRecording& recording, const Activity& activity) {
  if (!recording.has_units || activity.unit == kNoSubject) {
    return "";
  }
  const std::string& name = recording.units[activity.unit];
  return name.empty() ? "root" : name;
}

bool IsHostCopy(ActivityKind kind) {
  return kind == ActivityKind::kToDevice || kind == ActivityKind::kToHost;
}

// Of what the host did in ranges of this kind, that during which the compute queue did nothing.
double IdleIn(const ProfilerRecording& recording, HostRangeKind kind, std::uint32_t queue,
              const std::vector<bool>& counts) {
  double idle = 0;
  for (const HostRange& range : recording.ranges) {
    if (range.kind != kind || !counts[range.step]) {
      continue;
    }
    idle += ToSeconds(range.end - range.begin).value;
    if (!recording.on_device) {
      continue;  // the work inside is the loader's own
    }
    SimTime from = range.begin;
    for (const Activity& activity : recording.activities) {
      if (activity.queue == queue && activity.end > from && activity.start < range.end) {
        const SimTime begin = std::max(from, activity.start);
        const SimTime end = std::min(range.end, activity.end);
        idle -= ToSeconds(std::max(begin, end) - begin).value;
        from = std::max(from, end);
      }
    }
  }
  return idle;
}

void AddRecording(const ProfilerRecording& recording, Sums& sums) {
  StepCosts& costs = sums.costs();
  const std::uint32_t queue = BusiestQueue(recording);
  std::vector<bool> counts(recording.steps.size(), false);
  for (const RecordingStep& step : FindSteps(recording)) {
    counts[step.step] = true;
    sums.AddStep(step.parts);
    costs.before_first += step.before_first;
    for (const RecordedWait& wait : step.waits) {
      const Activity& activity = recording.activities[wait.activity];
      if (activity.kind == ActivityKind::kCollective && IsOfUnit(activity.collective)) {
        Wait(CollectiveOf(activity), wait.seconds, wait.began_late,
             sums.Unit(UnitOf(recording, activity)));
      } else if (IsHostCopy(activity.kind)) {
        costs.copies_exposed += wait.seconds;
      }
    }
  }
  if (!IsIn(counts, true)) {
    throw InputError(recording.file, "no step with work", "at least one training step");
  }
  bool moves_states = false;  // an optimizer on the host needs the gradients there
  for (const Activity& activity : recording.activities) {
    if (!counts[activity.step]) {
      continue;
    }
    costs.micro_batches = std::max<std::int64_t>(costs.micro_batches, activity.micro_batch + 1);
    costs.kernels += activity.queue == queue ? 1 : 0;
    if (activity.kind == ActivityKind::kCollective && IsOfUnit(activity.collective)) {
      Count(CollectiveOf(activity), sums.Unit(UnitOf(recording, activity)));
    } else if (IsHostCopy(activity.kind)) {
      costs.copies_busy += ToSeconds(activity.end - activity.start).value;
      moves_states = moves_states || activity.kind == ActivityKind::kToHost;
    }
  }
  std::vector<bool> compiled(counts.size(), false);
  for (const HostRange& range : recording.ranges) {
    if (range.kind == HostRangeKind::kCompiledRegion && counts[range.step]) {
      ++costs.compiled_regions;
      compiled[range.step] = true;
    }
  }
  costs.compiled_steps += CountOf(compiled, true);
  costs.data_loading += IdleIn(recording, HostRangeKind::kDataLoader, queue, counts);
  if (recording.on_device && moves_states) {
    costs.host_updates += IdleIn(recording, HostRangeKind::kOptimizer, queue, counts);
  }
  costs.on_device = costs.on_device && recording.on_device;
  costs.names_units = costs.names_units && recording.has_units;
}

// A collective op of our own, or nothing.
std::optional<Collective> CollectiveOf(const Program& program, const Op& op, const Span* span) {
  const OpShape& shape = program.ShapeOf(op);
  if (!InfoOf(shape.code).is_collective || !IsOfUnit(shape.code) || op.subject == kNoSubject ||
      op.subject >= program.units.size()) {
    return std::nullopt;
  }
  return Collective{shape.code, op.phase == Phase::kBackward || op.phase == Phase::kRecompute,
                    shape.bytes, span == nullptr ? 0 : ToSeconds(span->end - span->start).value};
}

void AddOwnStep(const Program& program, const Trace& trace, const std::vector<RecordedStep>& steps,
                std::size_t index, std::optional<SimTime> period, Sums& sums) {
  StepCosts& costs = sums.costs();
  sums.AddStep(BreakDown(program, trace, steps, index, period));
  const std::size_t first = steps[index].first;
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const Op& op = program.step.ops[i];
    const Span& span = trace.spans[first + i];
    const OpCode code = program.ShapeOf(op).code;
    costs.kernels += span.stream == Stream::kCompute ? 1 : 0;
    if (code == OpCode::kHostOptimizerStep) {
      costs.host_updates += ToSeconds(span.end - span.start).value;
    } else if (code == OpCode::kCopyH2d || code == OpCode::kCopyD2h) {
      costs.copies_busy += ToSeconds(span.end - span.start).value;
    } else if (const auto collective = CollectiveOf(program, op, &span)) {
      Count(*collective, sums.Unit(program.units[op.subject].name));
    }
  }
  for (const ComputeWait& wait : FindComputeWaits(program, trace, steps, index, period)) {
    // What was carried over from a step that was not recorded is not known.
    if (wait.kind != WaitKind::kEdge || !wait.cause.valid()) {
      continue;
    }
    const double seconds = ToSeconds(wait.end - wait.begin).value;
    const Op& cause = program.step.ops[wait.cause.value];
    if (const auto collective = CollectiveOf(program, cause, nullptr)) {
      const Span& span = trace.spans[first + wait.cause.value];
      Wait(*collective, seconds, span.start >= wait.begin,
           sums.Unit(program.units[cause.subject].name));
    } else if (wait.stream == Stream::kH2d || wait.stream == Stream::kD2h) {
      costs.copies_exposed += seconds;
    }
  }
}

}  // namespace

double StepCosts::Exposed() const {
  return std::accumulate(units.begin(), units.end(), 0.0,
                         [](double sum, const UnitCosts& unit) { return sum + unit.Exposed(); });
}

double StepCosts::HostIdle() const {
  const double idle = parts.host_issue + (on_device ? parts.other : 0);
  return std::max(0.0, idle - std::min(data_loading, before_first) - host_updates);
}

StepCosts CostsOf(const std::vector<ProfilerRecording>& recordings) {
  SW_CHECK(!recordings.empty(), "nothing to take costs of");
  Sums sums;
  for (const ProfilerRecording& recording : recordings) {
    AddRecording(recording, sums);
  }
  sums.costs().ranks = std::ssize(recordings);
  return sums.Means();
}

StepCosts CostsOf(const Program& program, const Trace& trace, std::optional<SimTime> period) {
  const std::vector<RecordedStep> steps = FindRecordedSteps(program, trace);
  if (steps.empty()) {
    throw InputError("the trace", "no complete step", "all ops of at least one step");
  }
  const auto has_previous = [](const RecordedStep& step) {
    return step.previous != RecordedStep::kNoStep;
  };
  const bool any = AnyOf(steps, has_previous);
  Sums sums;
  std::vector<Rank> ranks;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (!any || has_previous(steps[i])) {
      AddOwnStep(program, trace, steps, i, period, sums);
    }
    if (ranks.empty() || ranks.back() != steps[i].rank) {
      ranks.push_back(steps[i].rank);
    }
  }
  StepCosts& costs = sums.costs();
  costs.ranks = std::ssize(ranks);
  costs.micro_batches = program.micro_batch_count;
  return sums.Means();
}

}  // namespace shardwright
