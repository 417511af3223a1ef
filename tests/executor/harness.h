#pragma once

// Trains a model under a plan on host ranks and tells what came out.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "executor/host/device.h"
#include "executor/runtime.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "traces/trace.h"

namespace shardwright::testing {

struct Setup {
  Model model;
  Job job;
  Plan plan;
  TrainingOptions training;
  HostOptions host;
  RunOptions run;
  ModelKernel kernel;
  std::int64_t steps = 3;
  std::int64_t loss_chunks = 1;          // of the kernel set
  Fp8Products fp8 = Fp8Products::kNone;  // likewise
};

struct Outcome {
  // By parameter: all its elements, put together from the shards of one replica. Aliases are empty.
  // Of a model whose experts ranks share out: by parameter of the whole model (AllParts).
  std::vector<std::vector<float>> weights;
  bool replicas_agree = true;
  std::vector<std::vector<float>> buffers;  // by rank: non-parameter state, modules in their order
  std::vector<double> losses;               // by step
  std::vector<double> norms;                // by step, of all gradients, where they are clipped
  std::vector<SimTime> ends;                // by step, as reported
  LossScaler scaler;
  std::int64_t skipped_steps = 0;
  Trace trace;
  std::vector<std::string> findings;  // of CheckTrace on the trace
};

// Lowers with kernel set shardwright-host, verifies, places, runs with poisoned memory and a trace.
[[nodiscard]] Outcome Train(const Setup& setup);

// The same with a program that may differ from Lower's, which `legal` is: it runs at the places of
// `legal`, and its trace is checked against `legal`.
[[nodiscard]] Outcome TrainProgram(const Setup& setup, const Program& program,
                                   const Program& legal);
// Likewise of a pipeline's stages.
[[nodiscard]] Outcome TrainPrograms(const Setup& setup, std::span<const Program> programs,
                                    std::span<const Program> legal);
// What a runtime of the setup gives, wherever its ranks run; without findings.
[[nodiscard]] Outcome RunToEnd(const Setup& setup, const Program& program, Runtime& runtime);
[[nodiscard]] Program LowerSetup(const Setup& setup);
// The programs of a pipeline's stages; one without a pipeline.
[[nodiscard]] std::vector<Program> LowerAllStages(const Setup& setup);
// A built-in kernel set with the setup's changes.
[[nodiscard]] KernelSetOptions KernelsOf(const Setup& setup, const char* name);

// By step, the latest end of a span of any rank. Of a run that began with step 0.
[[nodiscard]] std::vector<SimTime> LastEnds(const Trace& trace);

// The tiny network in fp32 without clipping, micro-batch 2, blocks as units, on `ranks` ranks.
[[nodiscard]] Setup TinySetup(Dialect dialect, std::int64_t ranks);

// Plain gradient descent in fp32 at `rate` on the host's kernels, without clipping or weight decay;
// inputs and plan are still to be set.
[[nodiscard]] Setup DescentSetup(Model model, double rate);

// The host's kernels as a ModelKernel.
void HostKernel(const ModelOpCall& call, bool is_backward);

// The largest difference between two sets of weights, over the largest weight.
[[nodiscard]] double RelativeDifference(const Outcome& x, const Outcome& y);

// The largest difference of each tensor's elements over its largest update since `first`, or over a
// hundredth of the model's largest where that is more: some gradients are sums that cancel to
// nothing, as that of a router whose one weight is normalised to 1.
[[nodiscard]] double UpdateDifference(const Outcome& x, const Outcome& y, const Outcome& first);

}  // namespace shardwright::testing
