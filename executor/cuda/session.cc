// A run on GPUs: checks of the plan, the devices, the runtime that steps them.
//
// Everything that can be refused is refused before the GPU has given any memory: plans with tensor
// parallelism or experts shared out, other kernel sets, optimizers without a kernel, ops without a
// kernel. Each message names the field of the plan.
//
// Example: 4 ranks with loopback are one CudaWorld and 4 CudaDevices on 4 threads; with processes
// each has one of each.

#include "executor/cuda/session.h"

#include <string>
#include <utility>

#include "core/error.h"
#include "core/printable.h"
#include "executor/binding.h"
#include "executor/optimizer.h"
#include "traces/waits.h"

namespace shardwright {

void CheckCudaPlan(const SessionInput& in) {
  if (in.program.tensor_size * in.program.context_size > 1) {
    throw InputError(
        "plan: tensor_size, context_size",
        std::to_string(in.program.tensor_size) + ", " + std::to_string(in.program.context_size),
        "1, since GPUs do not run plans that cut layers or tokens over ranks yet");
  }
  if (in.program.pipeline_size > 1) {
    throw InputError("plan: pipeline_size", std::to_string(in.program.pipeline_size),
                     "1, since pipelines run on the host device only",
                     "--device host, with a plan made with --kernel-set shardwright-host");
  }
  if (in.program.expert_size > 1) {
    throw InputError("plan: expert_size", std::to_string(in.program.expert_size),
                     "1, since plans that share out experts run on the host device only",
                     "--device host, with a plan made with --kernel-set shardwright-host");
  }
  if (!in.kernels.cuda_kernels) {
    throw InputError("plan: kernel_set", '"' + in.kernels.name + '"',
                     "\"shardwright-cuda-plain\", the kernels that the CUDA device has",
                     "make the plan with --kernel-set shardwright-cuda-plain");
  }
  CheckUpdates(in.job.optimizer, in.job.precision.master);
  if (in.job.optimizer.kind == OptimizerKind::kAdafactor) {
    throw InputError("plan: job.optimizer.kind", "\"adafactor\"",
                     "another one, since only the host device has such an update");
  }
  CheckFrozen(in.job);
  for (std::size_t i = 0; i < in.model.ops.size(); ++i) {
    const std::string problem =
        CudaKernelProblem(in.model.SpecOf(in.model.ops[i]), in.job.precision.param, in.kernels);
    if (!problem.empty()) {
      throw InputError("plan: op " + in.program.model_op_names[i] + ": " + problem);
    }
  }
}

namespace {

Placement Check(const SessionInput& in) {
  CheckCudaPlan(in);
  return Place(in.program);
}

}  // namespace

CudaSession::CudaSession(const SessionInput& input, const CudaOptions& options, Gpu& gpu,
                         RunOptions run)
    : placement_(Check(input)),
      input_{input.model, input.kernels, input.job, input.program, placement_, input.training},
      context_{input_, InitRules(input.model, input.training.init_std), {}},
      activities_(options.activities),
      world_(std::make_unique<CudaWorld>(context_, options, gpu)),
      runtime_(std::make_unique<Runtime>(
          std::vector{input_},
          [this](Rank rank) { return std::make_unique<CudaDevice>(*world_, rank); },
          std::move(run))) {}

std::string CudaSession::graphs() const {
  const CudaWorld::GraphCounts& counts = world_->graph_counts;
  return world_->options.graphs
             ? std::to_string(counts.graphs) + " graphs of " + std::to_string(counts.ops) +
                   " ops, " + std::to_string(counts.refused) + " refused"
             : std::string();
}

// With CUPTI the spans get their times here, before the trace is read; without it they have them
// from events already.
Trace CudaSession::TakeTrace() {
  if (activities_ == nullptr) {
    return runtime_->TakeTrace();
  }
  const std::size_t dropped = activities_->Write(world_->clock);
  if (dropped > 0) {
    Say("warning: CUPTI dropped " + std::to_string(dropped) + " records; some ops look shorter");
  }
  Trace trace = runtime_->TakeTrace();
  if (world_->options.processes == nullptr) {
    EndTogether(input_.program, trace);  // loopback
  }
  return trace;
}

}  // namespace shardwright
