#include <utility>

#include "analysis/recording_steps.h"
#include "analysis/report/recording.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

constexpr const char* kRootUnit = "root";  // the unit without a name

OpColour ColourOf(const Activity& activity) {
  switch (activity.kind) {
    case ActivityKind::kCollective:
      return activity.collective == OpCode::kAllGather       ? OpColour::kAllGather
             : activity.collective == OpCode::kReduceScatter ? OpColour::kReduceScatter
                                                             : OpColour::kAllReduce;
    case ActivityKind::kKernel:
      return activity.phase == Phase::kForward     ? OpColour::kForward
             : activity.phase == Phase::kOptimizer ? OpColour::kOptimizer
                                                   : OpColour::kBackward;
    case ActivityKind::kToDevice:
    case ActivityKind::kToHost:
    case ActivityKind::kWithinDevice:
      break;
  }
  return OpColour::kCopy;
}

RecordingStep MedianStep(const ProfilerRecording& recording) {
  std::vector<RecordingStep> steps = FindSteps(recording);
  SortAll(steps, [](const RecordingStep& a, const RecordingStep& b) {
    return std::pair(a.parts.period, a.step) < std::pair(b.parts.period, b.step);
  });
  return steps[(steps.size() - 1) / 2];
}

SimTime LastComputeEnd(const ProfilerRecording& recording, std::uint32_t step) {
  const std::uint32_t queue = BusiestQueue(recording);
  SimTime end = recording.steps[step].begin;
  for (const Activity& activity : recording.activities) {
    if (activity.step == step && activity.queue == queue) {
      end = std::max(end, activity.end);
    }
  }
  return end;
}

Span SpanOf(const Activity& activity, SimTime zero) {
  Span span;
  span.stream = StreamOf(activity);
  span.issue_begin = (activity.has_issue ? activity.issue_begin : activity.start) - zero;
  span.issue_end = (activity.has_issue ? activity.issue_end : activity.start) - zero;
  span.issued = span.issue_end;
  span.start = activity.start - zero;
  span.ready = span.start;
  span.arrival = span.start;
  span.end = activity.end - zero;
  return span;
}

Recording::Bar BarOf(const ProfilerRecording& recording, const Activity& activity) {
  Recording::Bar bar;
  bar.colour = ColourOf(activity);
  bar.micro_batch = activity.micro_batch;
  if (activity.unit != kNoSubject) {
    const std::string& unit = recording.units[activity.unit];
    bar.unit = unit.empty() ? kRootUnit : unit;
  }
  bar.name = std::string(NameOf(activity.phase)) + "." + recording.names[activity.name];
  return bar;
}

std::vector<MemorySample> MemoryOf(const ProfilerRecording& recording, SimTime begin, SimTime end,
                                   SimTime zero) {
  std::vector<MemorySample> samples;
  for (const AllocatorSample& sample : recording.memory) {
    if (sample.time >= begin && sample.time <= end) {
      MemorySample& moved = samples.emplace_back();
      moved.time = sample.time - zero;
      moved.device[static_cast<std::size_t>(Category::kTemporary)] = sample.allocated;
      moved.reserved = sample.reserved;
    }
  }
  return ThinOut(samples, kMaxMemorySamples);
}

}  // namespace

Recording ForeignRecording(const ProfilerRecording& recording) {
  const RecordingStep step = MedianStep(recording);
  const SimTime end = LastComputeEnd(recording, step.step);
  Recording result;
  result.rank = Rank(static_cast<std::uint32_t>(recording.rank));
  result.step = step.step;
  result.period = ToSimTime(Seconds(step.parts.period));
  const SimTime zero = end - result.period;
  SimTime first = end;
  for (const Activity& activity : recording.activities) {
    if (activity.step == step.step) {
      result.spans.push_back(SpanOf(activity, zero));
      result.bars.push_back(BarOf(recording, activity));
      first = std::min(first, activity.has_issue ? activity.issue_begin : activity.start);
    }
  }
  result.memory = MemoryOf(recording, first, end, zero);
  return result;
}

}  // namespace shardwright
