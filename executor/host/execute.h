#pragma once

// Runs the calls that need one rank only.

#include <functional>

#include "executor/binding.h"
#include "executor/call.h"
#include "executor/initialize.h"

namespace shardwright {

// Forward or backward of one model op. Tests replace it to plant faults.
using ModelKernel = std::function<void(const ModelOpCall& call, bool is_backward)>;

// What calls need beside their own memory; the same on all ranks, constant during a run.
struct ExecuteContext {
  const ExecutorInput& input;
  std::vector<InitRule> init_rules;
  ModelKernel kernel;
};

// Everything but collectives, on the calling thread and those of `team` (null: it alone). `step`
// may be changed: the losses it holds.
void Execute(Call& call, StepContext& step, const ExecuteContext& context, Team* team = nullptr);

}  // namespace shardwright
