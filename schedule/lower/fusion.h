#pragma once

// Ops of the model that one kernel runs together, by kernel set.

#include "schedule/lower/regions.h"

namespace shardwright {

// Does the norm read all of its input, row behind row?
[[nodiscard]] bool IsNormOfWhole(const Model& model, const ModelOp& op);

// KernelSetOptions::fused_gelu: GELU runs inside the linear layers beside it; the activation itself
// has no kernels left. O(ops * regions).
void FuseGelu(const LowerInput& in, const PlannedRegions& regions, ModelAnalysis& a);

// KernelSetOptions::fused_residual: residual sums run inside the norms behind them. The sum itself
// has no kernels left; the norm reads both operands instead of their sum, and writes that, too.
// Reruns of regions must be known. O(ops).
void FuseSums(const Model& model, ModelAnalysis& a);

// KernelSetOptions::loss_chunks and loss_in_place: a linear layer and the loss right behind it wait
// for backward, and run there chunk by chunk. Not where either of them runs again. Regions must be
// known, and backward uses not yet counted. O(ops).
void FuseLoss(const LowerInput& in, ModelAnalysis& a);

}  // namespace shardwright
