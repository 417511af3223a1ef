#pragma once

// DeepSpeed's settings, and what of its offload is not simulated.

#include "core/json.h"
#include "planner/emitters/deepspeed.h"
#include "planner/importers/read_settings.h"

namespace shardwright {

// DeepSpeed's own file.
[[nodiscard]] ReadResult<DeepSpeedSettings> ReadDeepSpeed(const JsonValue& root);

// The table deepspeed_config, which `accelerate config` writes instead of such a file.
[[nodiscard]] ReadResult<DeepSpeedSettings> ReadInlineDeepSpeed(const JsonValue& table);

}  // namespace shardwright
