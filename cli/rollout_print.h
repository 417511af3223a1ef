#pragma once

// The phases of a step of GRPO, for people and as JSON.

#include <string>

#include "analysis/rollout.h"
#include "cli/command.h"
#include "cli/table.h"
#include "core/ordered_json.h"

namespace shardwright {

void AddPhases(const PlanFile& file, const RolloutPhases& phases, Table& table);
[[nodiscard]] nlohmann::ordered_json PhasesJson(const RolloutPhases& phases);

// The report with the phases behind it, where the plan has some.
[[nodiscard]] std::string WithPhases(const Arguments& arguments, const PlanFile& file,
                                     Seconds step_time, std::string report);

}  // namespace shardwright
