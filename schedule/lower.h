#pragma once

#include "core/units.h"
#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

struct LowerInput {
  const Model& model;  // built for job.sequence_length; frozen and LoRA already applied
  const KernelSetOptions& kernels;
  const Job& job;
  const Plan& plan;
};

// The program of one rank (all ranks of a pure data-parallel job are alike) under the rules of the
// plan's dialect; see docs/lowering.md. Throws InputError for a plan the dialect cannot express.
// Deterministic. O(ops * accumulation).
[[nodiscard]] Program Lower(const LowerInput& input);

}  // namespace shardwright
