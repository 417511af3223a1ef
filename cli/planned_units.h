#pragma once

// The units of a plan, as its program has them.

#include <vector>

#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

// One per entry of the plan, with the sizes of all of its parts: zero3 programs have several units
// for modules that share some of their parameters (schedule/lower/unit_parts.h). O(units * parts).
[[nodiscard]] std::vector<UnitInfo> PlannedUnits(const Plan& plan, const Program& program);

}  // namespace shardwright
