#pragma once

// What ZeRO-3's hooks go by, which is finer than units: DeepSpeed gathers, releases and reduces
// parameter by parameter, and looks ahead at calls of modules without parameters, too.

#include <cstdint>
#include <vector>

#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

// The units cut into their parameters, in the model's order. The first part has the unit's name,
// the others are "UNIT/PARAMETER"; all say by which entry of the plan they are, and have the
// modules that register the parameter, or the unit's where those have no hooks of their own. Units
// that share what is not the first parameter of its ops stay as they are. O(params * log params).
[[nodiscard]] std::vector<ResolvedUnit> SplitByParameters(const Model& model,
                                                          std::vector<ResolvedUnit> units);

// A unit without parameters for each module that is called and that no unit stands for, with
// kOnlyCalls in place of an entry of the plan; not for those inside of a unit's module, which
// DeepSpeed then takes for a leaf.
inline constexpr std::uint32_t kOnlyCalls = 0xffffffffu;
[[nodiscard]] std::vector<ResolvedUnit> CallsOfOthers(const Model& model,
                                                      const std::vector<ResolvedUnit>& units);

}  // namespace shardwright
