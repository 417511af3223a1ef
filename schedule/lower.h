#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/problem.h"
#include "schedule/program.h"

namespace shardwright {

struct LowerInput {
  LowerInput(const Problem& problem, const Plan& p)
      : LowerInput(problem.model, problem.kernels, problem.job, p) {}
  LowerInput(const Model& m, const KernelSetOptions& k, const Job& j, const Plan& p)
      : model(m), kernels(k), job(j), plan(p) {}

  const Model& model;  // built for job.sequence_length; frozen and LoRA already applied
  const KernelSetOptions& kernels;
  const Job& job;
  const Plan& plan;
  // By parameter, if there are any: trainable in the job, but without a gradient. `model` has them
  // frozen, and DDP reduces zeros for them.
  std::vector<bool> without_gradient = {};
  // Of a plan with a pipeline: of which of its ranks `model` and `plan` are (LowerStages).
  struct Stage {
    Pipeline pipeline;
    std::int64_t rank = 0;
  };
  std::optional<Stage> stage = {};
};

// The program of one rank (all ranks of a pure data-parallel job are alike) under the rules of the
// plan's dialect; see docs/lowering.md. Throws InputError for a plan the dialect cannot express.
// Deterministic. O(ops * accumulation).
[[nodiscard]] Program Lower(const LowerInput& input);

// The programs of the ranks of a pipeline, one per stage, in order; one where there is none. The
// model is whole. Throws InputError for what no rule cuts or lowers.
[[nodiscard]] std::vector<Program> LowerStages(const LowerInput& input);
// One of them: the model is cut for `rank` (CutStage), the plan is whole.
[[nodiscard]] Program LowerStage(const LowerInput& input, std::int64_t rank);

// FSDP2 leaves a parameter whose gradient is None out of reductions and updates, as it does frozen
// ones (fsdp_params_with_grad in post_backward of _fsdp_param_group.py), and DDP out of updates,
// where it looks for them: the model with those frozen on which the loss does not depend, if there
// are any. It is what Lower lowers, and what the program trains.
[[nodiscard]] std::optional<Model> WithoutMissingGradients(const LowerInput& input);

// Throws InputError when a step of `micro_batches` has too many ops to be lowered, `share` of it
// having `ops`.
void CheckOpCount(std::size_t ops, double share, std::int64_t micro_batches);

// Whether the program takes the norm of all gradients before the update: to clip them, or, with
// fp16, to learn on all ranks whether they overflowed under the loss scale.
[[nodiscard]] inline bool TakesGradNorm(const Job& job) {
  return job.clip_gradients || job.precision.param == DType::kFp16;
}

}  // namespace shardwright
