#pragma once

// DeepSpeed's JSON configuration (deepspeed.initialize(config=...)), as version 0.19 reads it.

#include <string>
#include <vector>

#include "planner/emitters/framework_settings.h"
#include "schedule/plan_file.h"

namespace shardwright {

// The nearest settings of a plan of any dialect. zero1 and zero2 keep their stage, ddp is stage 0,
// the rest is stage 3.
[[nodiscard]] DeepSpeedSettings ToDeepSpeed(const PlanFile& file);

// The modules that stage 3 fetches: leaf modules, of these classes, as a whole, the others one by
// one.
[[nodiscard]] std::vector<UnitPlan> FetchedUnits(const Model& model,
                                                 const std::vector<std::string>& classes);

// Changes job and plan to what DeepSpeed makes of the settings; unset members stand for its
// defaults. The sequence length stays, and so does recomputation, which is the model's.
void ApplyDeepSpeed(const DeepSpeedSettings& settings, PlanFile& file);

}  // namespace shardwright
