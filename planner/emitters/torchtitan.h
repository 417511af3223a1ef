#pragma once

// torchtitan's TOML (versions up to 0.2.2; later ones are configured in Python with the same
// names).

#include <string>

#include "planner/emitters/framework_settings.h"
#include "schedule/plan_file.h"

namespace shardwright {

[[nodiscard]] TorchtitanSettings ToTorchtitan(const PlanFile& file);

// Changes job and plan to what torchtitan makes of the settings; unset members stand for its
// defaults. Throws InputError for a value that it refuses; `where` names the file.
void ApplyTorchtitan(const TorchtitanSettings& settings, const std::string& where, PlanFile& file);

// torch.distributed.pipelining's name of a schedule, in any case; `name` is what the file has.
[[nodiscard]] PipelineSchedule PipelineScheduleNamed(const std::string& name,
                                                     const std::string& where);

// Sets the stages of each rank. Where `layers` is 0: one, or two where the schedule has several.
// Otherwise a stage has `layers` of `all`. `round`, "up" or "down", makes the stages a multiple of
// the ranks. Example: 32 layers by 5 are 7 stages; "down" makes 6 of them, 3 for each of 2 ranks.
// Throws InputError where the schedule cannot have so many.
void SetStages(std::int64_t all, std::int64_t layers, const std::string& round,
               const std::string& where, Plan& plan);

}  // namespace shardwright
