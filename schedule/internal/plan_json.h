#pragma once

// Strict reading of the parts of a plan file. Absent fields keep their defaults.

#include <vector>

#include "core/json.h"
#include "models/kernel_set.h"
#include "schedule/plan.h"

namespace shardwright::internal {

// A list of units. A unit needs "modules" only: its name is the FQN of its only module, "root" for
// the root, or the FQNs joined by '+'.
[[nodiscard]] std::vector<UnitPlan> ReadUnits(const JsonValue& json);

[[nodiscard]] Job ReadJob(const JsonValue& json);
[[nodiscard]] Plan ReadPlan(const JsonValue& json);

// A built-in kernel set by "name", with the options that differ from it.
[[nodiscard]] KernelSetOptions ReadKernelSet(const JsonValue& json);

}  // namespace shardwright::internal
