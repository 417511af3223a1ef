#pragma once

// Plans as data for the Python appliers (docs/emit.md describes the format).

#include <map>
#include <string>
#include <string_view>

#include "planner/emitters/emission.h"
#include "planner/emitters/emitters.h"

namespace shardwright {

// The JSON document that shardwright_plan.py reads. `kind` is "fsdp2" or "fsdp1";
// `file` is the plan as emitted. Throws InputError for a unit or region that has no name in the FQN
// dialect.
[[nodiscard]] std::string PlanDataJson(const PlanFile& file, std::string_view kind,
                                       FqnDialect fqns);

// The plan that fully_shard runs, of a plan of any dialect.
[[nodiscard]] PlanFile AsFsdp2(const PlanFile& file);
// The plan that FullyShardedDataParallel runs.
[[nodiscard]] PlanFile AsFsdp1(const PlanFile& file);

// A Python file that ships with Shardwright: "shardwright_plan.py".
[[nodiscard]] EmittedFile PythonFile(std::string_view name);

// The file templates/NAME.in with a value in place of each mark: @GPUS@ becomes 8 with {"GPUS",
// "8"}.
[[nodiscard]] std::string FilledTemplate(std::string_view name,
                                         const std::map<std::string, std::string>& values);

}  // namespace shardwright
