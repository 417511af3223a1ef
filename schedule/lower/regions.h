#pragma once

// Which stretches of the model backward runs again, and which of their ops: checkpointed modules,
// one inside of another among them, and what a compiler recomputes.

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "schedule/lower/analysis.h"

namespace shardwright {

// Regions without their reruns, in forward order, each with its index in the plan.
using PlannedRegions = std::vector<std::pair<Region, std::size_t>>;

// Those of the plan, one per call of a module. Throws InputError for modules that run no ops, and
// for regions that overlap as our programs cannot say. O(ops * depth).
[[nodiscard]] PlannedRegions FindPlannedRegions(const LowerInput& in, const std::string& where);

// Adds them with what they run again. Storages and gradients must be known.
void AddPlannedRegions(const LowerInput& in, const PlannedRegions& found, const std::string& where,
                       ModelAnalysis& a);

// A compiler recomputes cheap outputs instead of keeping them, inside each block that it compiles.
void FindCompiledRegions(const Model& model, const std::string& where, ModelAnalysis& a);

}  // namespace shardwright
