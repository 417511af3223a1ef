#pragma once

// Two plans side by side: what they choose, what that gives, and where the difference comes from.

#include <string>

#include "schedule/plan_file.h"

namespace shardwright {

// For people, and as JSON (docs/cli.md names the keys). Simulates both. Throws InputError for a
// plan that cannot be lowered.
[[nodiscard]] std::string PlanDiffText(const PlanFile& before, const PlanFile& after);
[[nodiscard]] std::string PlanDiffJson(const PlanFile& before, const PlanFile& after);

}  // namespace shardwright
