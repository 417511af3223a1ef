#include "analysis/predict_run.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "analysis/profile_numbers.h"
#include "schedule/lower.h"
#include "schedule/program.h"
#include "simulator/simulate.h"

namespace shardwright {

RunPrediction PredictRun(const PlanFile& file, bool expandable_segments) {
  const Program program = Lower(
      {.model = file.model.model, .kernels = file.kernels, .job = file.job, .plan = file.plan});
  SimulateOptions options;
  options.allocator.expandable_segments = expandable_segments;
  const SimulationResult result = Simulate(
      {.program = program, .cluster = file.cluster, .profile = file.profile, .options = options});
  RunPrediction prediction;
  prediction.step_time = ToSeconds(result.step_time);
  prediction.allocated = result.memory.allocated.DevicePeak().total;
  prediction.outside = result.memory.outside;
  prediction.usable = file.cluster.gpu.usable_memory.value;
  const ReservedMemory& reserved = *result.memory.reserved;
  prediction.reserved = std::max(reserved.peak_first, reserved.peak_steady);
  prediction.out_of_memory = reserved.out_of_memory || prediction.Margin() < Bytes(0);
  return prediction;
}

double StepTimeBand(const PlanFile& file) {
  const Program program = Lower(
      {.model = file.model.model, .kernels = file.kernels, .job = file.job, .plan = file.plan});
  SimulateOptions options;
  options.reserved = false;
  const auto step_time = [&](const Profile& profile) {
    const SimulationResult result = Simulate(
        {.program = program, .cluster = file.cluster, .profile = profile, .options = options});
    return ToSeconds(result.step_time).value;
  };
  const double expected = step_time(file.profile);
  double squares = 0;
  for (const std::string& path : NumberPaths(file.profile)) {
    Profile moved = file.profile;
    const NumberRef number = NumberAt(moved, path, "profile");
    if (*number.spread > 0 && *number.value > 0) {
      *number.value /= 1 + *number.spread;  // downwards, so that no fraction passes 1
      const double change = step_time(moved) / expected - 1;
      squares += change * change;
    }
  }
  return std::sqrt(squares);
}

}  // namespace shardwright
