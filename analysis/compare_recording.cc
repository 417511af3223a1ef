#include "analysis/compare_recording.h"

#include <map>
#include <span>
#include <string>
#include <utility>

#include "analysis/internal/comparison_parts.h"
#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

using Shares = std::array<double, kOpClassCount>;

// One step of the simulation, by the same kinds of rows as recordings.
struct SimulatedStep {
  StepBreakdown parts;
  Shares busy{};
  std::vector<double> op_seconds;
  std::map<SegmentKey, double> segments;
};

std::vector<Shares> SharesOfShapes(const CompareRecordingInput& input) {
  const KernelRates rates = FindKernelRates(input.cluster.gpu, input.profile.compute);
  return Mapped<Shares>(input.program.shapes, [&](const OpShape& shape) {
    return ClassShares(input.program, shape, rates);
  });
}

SimulatedStep Simulated(const CompareRecordingInput& input, const std::vector<Shares>& shares,
                        bool by_unit) {
  const Program& program = input.program;
  const std::vector<RecordedStep> steps = FindRecordedSteps(program, input.simulated);
  if (steps.empty()) {
    throw InputError("simulated trace", "no complete step", "all ops of at least one step");
  }
  SimulatedStep result;
  result.parts =
      BreakDown(program, input.simulated, steps, steps.size() - 1, input.simulated_period);
  result.parts.run.fill(0);
  const std::vector<SegmentKey> segments = SegmentsOf(program, by_unit);
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const Op& op = program.step.ops[i];
    const Span& span = input.simulated.spans[steps.back().first + i];
    const double seconds = ToSeconds(span.end - span.start).value;
    result.op_seconds.push_back(seconds);
    for (std::size_t c = 0; c < kOpClassCount; ++c) {
      const double part = seconds * shares[op.shape.value][c];
      result.busy[c] += part;
      result.parts.run[c] += span.stream == Stream::kCompute ? part : 0;
    }
    const OpShape& shape = program.ShapeOf(op);
    if (span.stream == Stream::kCompute && !InfoOf(shape.code).is_collective &&
        ClassOf(program, shape) != OpClass::kDeviceCopy) {
      result.segments[segments[i]] += seconds;
    }
  }
  return result;
}

// Means over the steps of all recordings.
struct Measured {
  StepBreakdown parts;
  Shares busy{};
  std::map<OpId, std::pair<double, std::int64_t>> ops;
  std::map<SegmentKey, double> segments;
  std::int64_t steps = 0;
  double shortest = 0, longest = 0;
  bool by_unit = true;
};

void AddStep(const RecordingStep& step, Measured& sum) {
  for (std::size_t i = 0; i < sum.busy.size(); ++i) {
    sum.busy[i] += step.busy[i];
  }
  Add(step.parts, sum.parts);
  sum.shortest = sum.steps == 0 ? step.parts.period : std::min(sum.shortest, step.parts.period);
  sum.longest = std::max(sum.longest, step.parts.period);
  ++sum.steps;
}

void Divide(Measured& sum) {
  const auto count = static_cast<double>(sum.steps);
  for (double& seconds : sum.busy) {
    seconds /= count;
  }
  Divide(sum.parts, count);
}

Measured Summarize(const CompareRecordingInput& input, Comparison& result) {
  Measured sum;
  for (const ProfilerRecording& recording : input.recordings) {
    const std::vector<RecordingStep> steps = FindSteps(recording);
    if (steps.empty()) {
      throw InputError(recording.file, "no step with work", "at least one training step");
    }
    for (const RecordingStep& step : steps) {
      AddStep(step, sum);
    }
    const RecordingJoin join = JoinRecording(input.program, recording, steps);
    const auto per_recording = 1.0 / static_cast<double>(input.recordings.size());
    sum.by_unit = sum.by_unit && join.by_unit;
    for (const RecordingJoin::Collective& row : join.collectives) {
      auto& [seconds, count] = sum.ops[row.op];
      seconds += row.seconds * static_cast<double>(row.count);
      count += row.count;
    }
    for (const RecordingJoin::Kernels& row : join.kernels) {
      if (row.op_class != OpClass::kDeviceCopy) {
        sum.segments[row.segment] += row.seconds * per_recording;
      }
    }
    result.spans += join.recorded;
    result.matched += join.matched;
    result.findings.insert(result.findings.end(), join.findings.begin(), join.findings.end());
    result.notes.insert(result.notes.end(), recording.notes.begin(), recording.notes.end());
    result.notes.insert(result.notes.end(), join.notes.begin(), join.notes.end());
    for (const AllocatorSample& sample : recording.memory) {
      result.memory.measured_peak = std::max(result.memory.measured_peak, sample.allocated);
    }
  }
  if (!sum.by_unit) {  // in one of several: in none
    std::map<SegmentKey, double> merged;
    for (const auto& [key, seconds] : sum.segments) {
      merged[{kNoSubject, key.micro_batch, key.phase}] += seconds;
    }
    sum.segments = std::move(merged);
  }
  Divide(sum);
  return sum;
}

void FillClasses(const CompareRecordingInput& input, const std::vector<Shares>& shares,
                 const SimulatedStep& simulated, const Measured& measured, Comparison& result) {
  std::array<std::int64_t, kOpClassCount> counts{};
  for (const Op& op : input.program.step.ops) {
    for (std::size_t c = 0; c < kOpClassCount; ++c) {
      counts[c] += shares[op.shape.value][c] > 0 ? 1 : 0;
    }
  }
  for (std::size_t c = 0; c < kOpClassCount; ++c) {
    if (simulated.busy[c] > 0 || measured.busy[c] > 0) {
      result.classes.push_back({static_cast<OpClass>(c), counts[c], Seconds(simulated.busy[c]),
                                Seconds(measured.busy[c])});
    }
  }
}

void FillSegments(const Program& program, const SimulatedStep& simulated, const Measured& measured,
                  Comparison& result) {
  std::map<SegmentKey, std::pair<double, double>> both;
  for (const auto& [key, seconds] : simulated.segments) {
    both[key].first = seconds;
  }
  for (const auto& [key, seconds] : measured.segments) {
    both[key].second = seconds;
  }
  for (const auto& [key, seconds] : both) {
    const std::string unit = key.unit == kNoSubject ? std::string() : program.units[key.unit].name;
    result.segments.push_back(
        {unit, key.phase, key.micro_batch, Seconds(seconds.first), Seconds(seconds.second)});
  }
  internal::SortByDifference(result.segments);
}

void FindCalibrations(const CompareRecordingInput& input, const std::vector<Shares>& shares,
                      Comparison& result) {
  const auto factor_of = [&](const OpShape& shape, std::span<const double> factors) {
    const auto index = static_cast<std::size_t>(&shape - input.program.shapes.data());
    double factor = 0;
    for (std::size_t c = 0; c < kOpClassCount; ++c) {
      factor += shares[index][c] * factors[c];
    }
    return factor;
  };
  internal::Recalibration again({input.program, input.prices, input.engine}, factor_of);
  Shares none;
  none.fill(1.0);
  Shares all = none;
  for (const ClassComparison& row : result.classes) {
    const auto index = static_cast<std::size_t>(row.op_class);
    if (row.op_class == OpClass::kControl || row.simulated.value <= 0 || row.measured.value <= 0) {
      continue;
    }
    all[index] = row.measured.value / row.simulated.value;
    Shares one = none;
    one[index] = all[index];
    result.calibrations.push_back({std::string(NameOf(row.op_class)),
                                   internal::FieldsOf(row.op_class), all[index],
                                   again.StepTime(one, 1.0)});
  }
  result.calibrated_step = again.StepTime(all, 1.0);
  internal::SortCalibrations(result);
}

}  // namespace

Shares ClassShares(const Program& program, const OpShape& shape, const KernelRates& rates) {
  Shares shares{};
  double total = 0;
  if (shape.code == OpCode::kCompute) {
    for (const Kernel& kernel : program.KernelsOf(shape)) {
      const double seconds = (KernelTime(kernel, rates) + rates.gap).value;
      shares[static_cast<std::size_t>(ClassOf(kernel.kind))] += seconds;
      total += seconds;
    }
  }
  if (total <= 0) {
    shares[static_cast<std::size_t>(ClassOf(program, shape))] = 1;
    return shares;
  }
  for (double& share : shares) {
    share /= total;
  }
  return shares;
}

Comparison CompareRecording(const CompareRecordingInput& input) {
  SW_CHECK(!input.recordings.empty(), "nothing to compare with");
  Comparison result;
  result.match = MatchRecordings(input.program, input.recordings);
  if (!result.match.IsRun()) {
    result.findings.push_back(result.match.Verdict());
  }
  const std::vector<Shares> shares = SharesOfShapes(input);
  const Measured measured = Summarize(input, result);
  const SimulatedStep simulated = Simulated(input, shares, measured.by_unit);
  result.simulated_step = Seconds(simulated.parts.Sum());
  result.measured_step = Seconds(measured.parts.period);
  result.measured_shortest = Seconds(measured.shortest);
  result.measured_longest = Seconds(measured.longest);
  result.measured_steps = measured.steps;
  result.ranks = std::ssize(input.recordings);
  result.parts = internal::PartsOf(simulated.parts, measured.parts);
  FillClasses(input, shares, simulated, measured, result);
  for (const auto& [op, row] : measured.ops) {
    result.ops.push_back({op, Seconds(simulated.op_seconds[op.value]),
                          Seconds(row.first / static_cast<double>(row.second))});
  }
  internal::SortByDifference(result.ops);
  FillSegments(input.program, simulated, measured, result);
  internal::FindPeak(input.simulated, result.memory.simulated_peak, result.memory.simulated);
  FindCalibrations(input, shares, result);
  return result;
}

}  // namespace shardwright
