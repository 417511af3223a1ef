// What recordings of foreign profilers tell about prices.

#include <map>
#include <span>
#include <utility>

#include "analysis/calibration_samples.h"
#include "analysis/piecewise_fit.h"
#include "analysis/recording_steps.h"
#include "core/error.h"

namespace shardwright {
namespace {

std::vector<RecordingStep> StepsOf(const ProfilerRecording& recording) {
  std::vector<RecordingStep> steps = FindSteps(recording);
  if (steps.empty()) {
    throw InputError(recording.file, "no step with work", "at least one training step");
  }
  return steps;
}

using KernelKey = std::pair<SegmentKey, OpClass>;

// Copies into and out of communication buffers, one per launch or, where that is not told, one in
// all.
void AddCopies(const Program& program, const OpShape& shape, std::vector<Kernel>& kernels) {
  const std::span<const Kernel> own = program.KernelsOf(shape);
  kernels.insert(kernels.end(), own.begin(), own.end());
  if (own.empty() && shape.bytes.value > 0) {
    Kernel copy;
    copy.kind = KernelClass::kCopy;
    copy.read = copy.written = shape.bytes;
    kernels.push_back(copy);
  }
}

bool IsDeviceCopy(OpCode code) {
  switch (code) {
    case OpCode::kCast:
    case OpCode::kGatherCopyIn:
    case OpCode::kGatherCopyOut:
    case OpCode::kConcatGrad:
    case OpCode::kReduceCopyIn:
    case OpCode::kGradScale:
    case OpCode::kGradStore:
    case OpCode::kBucketCopy:
      return true;
    default:
      return false;
  }
}

// The kernels that the program has in each segment, by class.
std::map<KernelKey, std::vector<Kernel>> KernelsOf(const Program& program, bool by_unit) {
  const std::vector<SegmentKey> segments = SegmentsOf(program, by_unit);
  std::map<KernelKey, std::vector<Kernel>> kernels;
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const OpShape& shape = program.ShapeOf(program.step.ops[i]);
    const bool counts = shape.code == OpCode::kCompute || shape.code == OpCode::kAccumulateGrad ||
                        shape.code == OpCode::kOptimizerStep || shape.code == OpCode::kGradNorm ||
                        shape.code == OpCode::kGradClip;
    if (IsDeviceCopy(shape.code)) {
      AddCopies(program, shape, kernels[{segments[i], OpClass::kDeviceCopy}]);
    }
    for (const Kernel& kernel : program.KernelsOf(shape)) {
      if (counts) {
        const bool updates = segments[i].phase == Phase::kOptimizer;
        kernels[{segments[i], updates ? OpClass::kOptimizer : ClassOf(kernel.kind)}].push_back(
            kernel);
      }
    }
  }
  return kernels;
}

}  // namespace

void AddRecordings(const std::vector<CalibrationRun>& runs, std::size_t index,
                   CalibrationSamples& samples) {
  const CalibrationRun& run = runs[index];
  const Program& program = run.program;
  std::map<ShapeId, std::vector<double>> collectives;
  for (const ProfilerRecording& recording : *run.recordings) {
    const RecordingJoin join = JoinRecording(program, recording, StepsOf(recording));
    for (const RecordingJoin::Collective& row : join.collectives) {
      collectives[program.step.ops[row.op.value].shape].push_back(
          row.seconds + (recording.on_device ? 0 : row.idle));
    }
    const auto kernels = KernelsOf(program, join.by_unit);
    for (const RecordingJoin::Kernels& row : join.kernels) {
      // A device's copies run beside its kernels, and the time between its kernels is the host's,
      // which profilers slow. Where the host computes, both are part of what the work costs.
      if (recording.on_device && row.op_class == OpClass::kDeviceCopy) {
        continue;
      }
      const double seconds = row.seconds + (recording.on_device ? 0 : row.idle);
      const auto found = kernels.find({row.segment, row.op_class});
      if (found != kernels.end() && !found->second.empty() && seconds > 0) {
        samples.kernels.push_back({index, found->second, seconds});
      }
    }
  }
  for (auto& [shape, seconds] : collectives) {
    ShapeSample sample;
    sample.run = index;
    sample.shape = shape;
    sample.ops = std::ssize(seconds);
    sample.seconds = MedianOf(std::move(seconds));
    samples.shapes.push_back(sample);
  }
}

Seconds RecordedStepTime(const std::vector<ProfilerRecording>& recordings) {
  std::vector<double> periods;
  for (const ProfilerRecording& recording : recordings) {
    for (const RecordingStep& step : StepsOf(recording)) {
      periods.push_back(step.parts.period);
    }
  }
  return Seconds(MedianOf(std::move(periods)));
}

}  // namespace shardwright
