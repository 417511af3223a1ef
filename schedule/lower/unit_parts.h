#pragma once

// DeepSpeed gathers, releases and reduces parameter by parameter. Those of a module go together,
// so units of modules say the same, but not of modules that share some of their parameters only.

#include <vector>

#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

// The units with one whose parameters lie in different modules cut into parts of those that lie in
// the same ones. The first part takes the unit's place and name, the others follow all units as
// "UNIT/MODULE+MODULE"; all say by which entry of the plan they are. Units that share what is not
// the first parameter of its ops stay as they are. O(params * log params).
[[nodiscard]] std::vector<ResolvedUnit> SplitByModules(const Model& model,
                                                       std::vector<ResolvedUnit> units);

}  // namespace shardwright
