#pragma once

// Ops of the model that one kernel runs together, by kernel set.

#include <cstddef>
#include <utility>
#include <vector>

#include "schedule/lower/analysis.h"

namespace shardwright {

// Regions without their reruns, in forward order, each with its index in the plan.
using PlannedRegions = std::vector<std::pair<Region, std::size_t>>;

// Does the norm read all of its input, row behind row?
[[nodiscard]] bool IsNormOfWhole(const Model& model, const ModelOp& op);

// KernelSetOptions::fused_gelu: GELU runs inside the linear layers beside it; the activation itself
// has no kernels left. O(ops * regions).
void FuseGelu(const LowerInput& in, const PlannedRegions& regions, ModelAnalysis& a);

// KernelSetOptions::fused_residual: residual sums run inside the norms behind them. The sum itself
// has no kernels left; the norm reads both operands instead of their sum, and writes that, too.
// Reruns of regions must be known. O(ops).
void FuseSums(const Model& model, ModelAnalysis& a);

}  // namespace shardwright
