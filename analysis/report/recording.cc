#include "analysis/report/recording.h"

#include <span>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

Bytes SumOf(const std::array<Bytes, kCategoryCount>& categories) {
  const Bytes sum = Summed<Bytes>(categories);
  return sum;
}

// The edge of `op` that was done last; edges to the step before are none of this recording's ops.
OpId AwaitedOf(const Program& program, std::span<const Span> spans, OpId op) {
  OpId last;
  for (const Edge& edge : program.step.EdgesOf(op)) {
    if (!edge.is_carried() &&
        (!last.valid() || spans[edge.op().value].end > spans[last.value].end)) {
      last = edge.op();
    }
  }
  return last;
}

SimTime LastComputeEnd(std::span<const Span> spans) {
  std::optional<SimTime> end;
  for (const Span& span : spans) {
    if (span.stream == Stream::kCompute) {
      end = std::max(end.value_or(span.end), span.end);
    }
  }
  SW_CHECK(end.has_value(), "a step without compute ops");
  return *end;
}

void Shift(Span& span, SimTime by) {
  for (SimTime* time : {&span.issue_begin, &span.issued, &span.issue_end, &span.ready,
                        &span.arrival, &span.start, &span.end}) {
    *time -= by;
  }
}

// The samples of a step at the times when the compute stream gets to where the host was.
std::vector<MemorySample> MemoryOnDevice(const Trace& trace, const RecordedStep& step,
                                         std::span<const Span> spans) {
  std::vector<MemorySample> moved;
  std::size_t next = 0;  // the first compute op that is issued at or after the sample
  SimTime time = spans.front().start;
  for (MemorySample sample : trace.memory) {
    if (sample.rank != step.rank || sample.step != step.step) {
      continue;
    }
    while (next < spans.size() &&
           (spans[next].stream != Stream::kCompute || spans[next].issue_begin < sample.time)) {
      time = std::max(time, spans[next].stream == Stream::kCompute ? spans[next].end : time);
      ++next;
    }
    sample.time = next < spans.size() ? std::max(time, spans[next].start) : time;
    moved.push_back(sample);
  }
  return moved;
}

Recording Cut(const Program& program, const Trace& trace, const std::vector<RecordedStep>& steps,
              std::size_t index, SimTime period) {
  const RecordedStep& step = steps[index];
  const std::span<const Span> spans =
      std::span(trace.spans).subspan(step.first, program.step.size());
  Recording recording;
  recording.rank = step.rank;
  recording.step = step.step;
  recording.period = period;
  const SimTime zero = LastComputeEnd(spans) - period;
  recording.spans.assign(spans.begin(), spans.end());
  for (std::size_t i = 0; i < spans.size(); ++i) {
    recording.awaited.push_back(AwaitedOf(program, spans, OpId(i)));
    Shift(recording.spans[i], zero);
  }
  recording.waits = FindComputeWaits(program, trace, steps, index, period);
  for (ComputeWait& wait : recording.waits) {
    wait.begin -= zero;
    wait.end -= zero;
  }
  recording.memory = ThinOut(MemoryOnDevice(trace, step, spans), kMaxMemorySamples);
  for (MemorySample& sample : recording.memory) {
    sample.time -= zero;
  }
  return recording;
}

// Indices of the steps of rank 0 whose length is known; of all its steps if there are none.
std::vector<std::size_t> Candidates(const std::vector<RecordedStep>& steps) {
  std::vector<std::size_t> known, all;
  for (std::size_t i = 0; i < steps.size() && steps[i].rank == steps[0].rank; ++i) {
    all.push_back(i);
    if (steps[i].previous != RecordedStep::kNoStep) {
      known.push_back(i);
    }
  }
  return known.empty() ? all : known;
}

}  // namespace

std::string_view NameOf(OpColour colour) {
  static constexpr std::array<std::string_view, kOpColourCount> kNames = {
      "forward",        "recompute",  "backward", "optimizer", "all_gather",
      "reduce_scatter", "all_reduce", "copy",     "host"};
  return kNames[static_cast<std::size_t>(colour)];
}

OpColour ColourOf(const Program& program, const Op& op) {
  const OpShape& shape = program.ShapeOf(op);
  const OpCodeInfo& info = InfoOf(shape.code);
  if (info.runs_on_host) {
    return OpColour::kHost;
  }
  if (info.is_collective) {
    return shape.code == OpCode::kAllGather       ? OpColour::kAllGather
           : shape.code == OpCode::kReduceScatter ? OpColour::kReduceScatter
                                                  : OpColour::kAllReduce;
  }
  const bool of_model = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad;
  if (!of_model && op.phase != Phase::kOptimizer) {
    return OpColour::kCopy;
  }
  switch (op.phase) {
    case Phase::kForward:
      return OpColour::kForward;
    case Phase::kRecompute:
      return OpColour::kRecompute;
    case Phase::kBackward:
      return OpColour::kBackward;
    case Phase::kOptimizer:
      return OpColour::kOptimizer;
    case Phase::kInit:
      break;
  }
  return OpColour::kCopy;
}

Recording SimulatedRecording(const Program& program, const Trace& trace, SimTime period,
                             const Attribution& attribution) {
  const std::vector<RecordedStep> steps = FindRecordedSteps(program, trace);
  SW_CHECK(!steps.empty(), "a simulation without a step");
  Recording recording = Cut(program, trace, steps, steps.size() - 1, period);
  recording.critical = attribution.critical_path;
  const std::size_t first = steps.back().first;
  const SimTime zero =
      LastComputeEnd(std::span(trace.spans).subspan(first, program.step.size())) - period;
  for (PathSegment& segment : recording.critical) {
    segment.begin -= zero;
    segment.end -= zero;
  }
  return recording;
}

std::optional<Recording> MeasuredRecording(const Program& program, const Trace& trace) {
  const std::vector<RecordedStep> steps = FindRecordedSteps(program, trace);
  if (steps.empty()) {
    return std::nullopt;
  }
  std::vector<std::pair<double, std::size_t>> by_length =
      Mapped<std::pair<double, std::size_t>>(Candidates(steps), [&](const std::size_t index) {
        return std::pair(BreakDown(program, trace, steps, index).period, index);
      });
  SortAll(by_length);
  const auto [length, index] = by_length[(by_length.size() - 1) / 2];
  return Cut(program, trace, steps, index, ToSimTime(Seconds(length)));
}

std::vector<MemorySample> ThinOut(const std::vector<MemorySample>& samples, std::size_t count) {
  std::vector<MemorySample> kept;
  if (samples.empty()) {
    return kept;
  }
  const SimTime begin = samples.front().time;
  const auto length = static_cast<double>((samples.back().time - begin).value);
  std::size_t stretch = 0;
  for (const MemorySample& sample : samples) {
    const double share =
        length > 0.0 ? static_cast<double>((sample.time - begin).value) / length : 0.0;
    const auto of = static_cast<std::size_t>(share * static_cast<double>(count - 1));
    if (kept.empty() || of != stretch) {
      kept.push_back(sample);
    } else if (SumOf(sample.device) >= SumOf(kept.back().device)) {
      kept.back() = sample;
    }
    stretch = of;
  }
  return kept;
}

}  // namespace shardwright
