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

}  // namespace shardwright
