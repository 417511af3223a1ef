#pragma once

// Two plans side by side: what they choose, what that gives, and where the difference comes from.

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "schedule/plan_file.h"

namespace shardwright {

// One field of the plan file that differs, such as "plan.recompute[model.layers.0].kind"; an absent
// side is empty.
struct PlanChange {
  std::string field;
  std::string before;
  std::string after;
  std::int64_t alike = 1;  // fields with this change, but for numbers in their names
};
[[nodiscard]] std::vector<PlanChange> PlanChanges(const PlanFile& before, const PlanFile& after);
[[nodiscard]] nlohmann::ordered_json ChangesJson(const std::vector<PlanChange>& changes);

// For people, and as JSON (docs/cli.md names the keys). Simulates both. Throws InputError for a
// plan that cannot be lowered.
[[nodiscard]] std::string PlanDiffText(const PlanFile& before, const PlanFile& after);
[[nodiscard]] std::string PlanDiffJson(const PlanFile& before, const PlanFile& after);

}  // namespace shardwright
