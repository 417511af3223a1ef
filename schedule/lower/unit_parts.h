#pragma once

// The units of ZeRO-3's hooks, which are finer than a plan's: DeepSpeed gathers, releases and
// reduces parameter by parameter. It also looks ahead at calls of modules without parameters.
// unit_parts.cc has an example.

#include <cstdint>
#include <vector>

#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

// The units cut into their parameters, in the model's order. The first part has the unit's name,
// the others are "UNIT/PARAMETER". Each says which entry of the plan it comes from. Each has the
// modules that register the parameter, or the unit's modules where those have no hooks of their
// own. A unit stays whole if it shares a parameter that is not the first of its op. O(params * log
// params).
[[nodiscard]] std::vector<ResolvedUnit> SplitByParameters(const Model& model,
                                                          std::vector<ResolvedUnit> units);

// A unit without parameters for each called module that no unit stands for. Its entry of the plan
// is kOnlyCalls. Modules inside of a unit's module have none: DeepSpeed takes the outer one for a
// leaf.
inline constexpr std::uint32_t kOnlyCalls = 0xffffffffu;
[[nodiscard]] std::vector<ResolvedUnit> CallsOfOthers(const Model& model,
                                                      const std::vector<ResolvedUnit>& units);

}  // namespace shardwright
