#pragma once

#include "core/json.h"
#include "topologies/profile_fit.h"

namespace shardwright::internal {

// The key "fit" of a profile file. Throws InputError.
[[nodiscard]] ProfileFit ReadProfileFit(const JsonValue& value);

}  // namespace shardwright::internal
