#include "analysis/predict_run.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include "analysis/profile_numbers.h"
#include "schedule/lower.h"
#include "schedule/program.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"
#include "simulator/stages.h"

namespace shardwright {
namespace {

// What cuBLAS holds inside PyTorch's allocator from the first matrix product on: one workspace per
// handle and stream, and a handle per thread that multiplies, of which training has two (autograd
// runs backward in its own). Not part of programs, whose buffers are what plans decide about.
Bytes BlasWorkspace(const PlanFile& file) {
  const std::int64_t threads = file.job.mode == JobMode::kTrain ? 2 : 1;
  return file.profile.memory.blas_workspace.value * threads;
}

}  // namespace

RunPrediction PredictRun(const PlanFile& file) {
  const Program program = Lower({file, file.plan});
  SimulateOptions options;
  options.allocator = AllocatorOptionsOf(file.job.allocator);
  const SimulationResult result = Simulate(program, file.cluster, file.profile, options);
  RunPrediction prediction;
  prediction.step_time = ToSeconds(result.step_time);
  const Bytes workspace = BlasWorkspace(file);
  prediction.allocated = result.memory.allocated.DevicePeak().total + workspace;
  prediction.outside = result.memory.outside;
  prediction.usable = file.cluster.gpu.usable_memory.value;
  const ReservedMemory& reserved = *result.memory.reserved;
  prediction.reserved = std::max(reserved.peak_first, reserved.peak_steady) + workspace;
  prediction.out_of_memory = reserved.out_of_memory || prediction.Margin() < Bytes(0);
  return prediction;
}

// Of a pipeline: the programs of its ranks, with two micro-batches of each at most.
static std::vector<Program> FewOfStages(const PlanFile& file) {
  Plan plan = file.plan;
  plan.accumulation = std::min(plan.accumulation, 2 * plan.pipeline_size);
  Job job = file.job;
  job.global_batch = 0;
  return plan.pipeline_size > 1 ? LowerStages({file.model, file.kernels, job, plan})
                                : std::vector<Program>();
}

double StepTimeBand(const PlanFile& file) {
  PlanPrograms programs({file, file.plan});
  const std::vector<Program> stages = FewOfStages(file);
  SimulateOptions options;
  options.reserved = false;
  Simulator simulator(file.cluster, file.profile);
  const auto step_time = [&](const Profile& profile) {
    if (!stages.empty()) {
      return ToSeconds(TimeOfStages(stages, file.cluster, profile, true).step_time).value;
    }
    simulator.Use(file.cluster, profile);
    return ToSeconds(SimulatePlan(simulator, programs, options).step_time).value;
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
