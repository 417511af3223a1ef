#pragma once

// A plan on the host device, with everything it needs in one place: program, placement, kernels,
// ranks.

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "executor/host/device.h"
#include "executor/runtime.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/place.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

// What is run, of a pipeline by the ranks of one stage. All of it outlives the session.
struct SessionInput {
  const Model& model;
  const KernelSetOptions& kernels;
  const Job& job;
  const Program& program;  // accepted by Verify
  const TrainingOptions& training;
};

class HostSession {
 public:
  // Refuses what it cannot run, before any memory is taken: InputError for a kernel set that is not
  // the host's, an op without a host kernel, or an op of the program that no device knows;
  // EnvironmentError without OpenBLAS; RunError when memory does not suffice.
  // `watch` may wrap the kernels (evaluation counts behind the loss).
  using KernelWrapper = std::function<ModelKernel(ModelKernel)>;
  // `inputs`: by stage of the pipeline; one where there is none.
  HostSession(std::span<const SessionInput> inputs, const HostOptions& host, RunOptions run,
              const KernelWrapper& watch = {});

  [[nodiscard]] Runtime& runtime() { return *runtime_; }
  // Watches for a failure from outside, such as a process that must end although a thread hangs.
  [[nodiscard]] FaultBoard& faults() { return world_->faults; }

 private:
  const std::vector<Placement> placements_;  // by stage, as what follows
  const std::vector<ExecutorInput> inputs_;
  const std::vector<ExecuteContext> contexts_;
  std::unique_ptr<HostWorld> world_;
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace shardwright
