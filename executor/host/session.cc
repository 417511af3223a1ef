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

}  // namespace

HostSession::HostSession(const SessionInput& input, const HostOptions& host, RunOptions run,
                         const KernelWrapper& watch)
    : placement_(Check(input)),
      input_{input.model, input.kernels, input.job, input.program, placement_, input.training},
      context_{input_, InitRules(input.model, input.training.init_std),
               watch ? watch(RunKernel) : RunKernel},
      world_(std::make_unique<HostWorld>(context_, host)),
      runtime_(std::make_unique<Runtime>(
          input_, [this](Rank rank) { return std::make_unique<HostDevice>(*world_, rank); },
          std::move(run))) {}

}  // namespace shardwright
