#include "executor/host/session.h"

#include <string>
#include <utility>

#include "core/error.h"
#include "executor/host/kernels/gemm.h"
#include "executor/host/kernels/table.h"
#include "executor/optimizer.h"

namespace shardwright {
namespace {

void RunKernel(const ModelOpCall& call, bool is_backward) {
  if (is_backward) {
    BackwardOnHost(call);
  } else {
    ForwardOnHost(call);
  }
}

// Checks what the kernels need; returns the placement, which the members are made from.
Placement Check(const SessionInput& in) {
  CheckCuts(in.model, in.job);
  if (!in.kernels.host_kernels) {
    throw InputError("plan: kernel_set", '"' + in.kernels.name + '"',
                     "\"shardwright-host\", the kernels that the host device has",
                     "make the plan with --kernel-set shardwright-host");
  }
  CheckUpdates(in.job.optimizer, in.job.precision.master);
  CheckFrozen(in.job);
  for (std::size_t i = 0; i < in.model.ops.size(); ++i) {
    const std::string problem =
        HostKernelProblem(in.model.SpecOf(in.model.ops[i]), in.job.precision.param, in.kernels);
    if (!problem.empty()) {
      throw InputError("plan: op " + in.program.model_op_names[i] + ": " + problem);
    }
  }
  LoadHostProducts();
  return Place(in.program);
}

std::vector<Placement> CheckAll(std::span<const SessionInput> inputs) {
  std::vector<Placement> placements;
  for (const SessionInput& in : inputs) {
    placements.push_back(Check(in));
  }
  return placements;
}

std::vector<ExecutorInput> InputsOf(std::span<const SessionInput> inputs,
                                    const std::vector<Placement>& placements) {
  std::vector<ExecutorInput> result;
  for (const SessionInput& in : inputs) {
    result.push_back(
        {in.model, in.kernels, in.job, in.program, placements[result.size()], in.training});
  }
  return result;
}

std::vector<ExecuteContext> ContextsOf(const std::vector<ExecutorInput>& inputs,
                                       const ModelKernel& kernel) {
  std::vector<ExecuteContext> contexts;
  for (const ExecutorInput& in : inputs) {
    contexts.push_back({in, InitRules(in.model, in.training.init_std), kernel});
  }
  return contexts;
}

}  // namespace

HostSession::HostSession(std::span<const SessionInput> inputs, const HostOptions& host,
                         RunOptions run, const KernelWrapper& watch)
    : placements_(CheckAll(inputs)),
      inputs_(InputsOf(inputs, placements_)),
      contexts_(ContextsOf(inputs_, watch ? watch(RunKernel) : RunKernel)),
      world_(std::make_unique<HostWorld>(contexts_, host)),
      runtime_(std::make_unique<Runtime>(
          inputs_, [this](Rank rank) { return std::make_unique<HostDevice>(*world_, rank); },
          std::move(run))) {}

}  // namespace shardwright
