#pragma once

// The parts of a plan file: strict reading, in which absent fields keep their defaults, and
// writing. A field of a job, plan or kernel set is one row of a table in plan_json.cc.

#include <vector>

#include <nlohmann/json_fwd.hpp>

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

[[nodiscard]] nlohmann::ordered_json JobJson(const Job& job);
[[nodiscard]] nlohmann::ordered_json PlanJson(const Plan& plan);
[[nodiscard]] nlohmann::ordered_json KernelSetJson(const KernelSetOptions& kernels);

}  // namespace shardwright::internal
