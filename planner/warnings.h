#pragma once

// Says what the user of a plan must know although the plan is right.

#include <string>
#include <vector>

#include "schedule/plan_file.h"

namespace shardwright {

// One line each: what the loader left out or assumed, and experts that FSDP2 pads.
[[nodiscard]] std::vector<std::string> WarningsOf(const PlanFile& file);

}  // namespace shardwright
