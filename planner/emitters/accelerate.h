#pragma once

// Accelerate's YAML (`accelerate launch --config_file`), as version 1.15 reads it.

#include <cstdint>
#include <string>

#include "planner/emitters/framework_settings.h"
#include "planner/emitters/hf_fsdp.h"

namespace shardwright {

// What `accelerate launch` passes on as fsdp_min_num_params where the file has no such key.
inline constexpr std::int64_t kLauncherMinNumParams = 100'000'000;

// distributed_type FSDP only.
[[nodiscard]] AccelerateSettings ToAccelerate(const HfFsdp& fsdp, const Cluster& cluster);
// Unset members stand for the defaults of `accelerate launch`. Throws InputError for a value that
// Accelerate refuses; `where` names the file.
[[nodiscard]] HfFsdp FromAccelerate(const AccelerateSettings& settings, const std::string& where);

}  // namespace shardwright
