#pragma once

// What plan, simulate and inspect say of a plan whose ranks have other layers each: all of its
// stages are lowered and simulated.

#include <initializer_list>
#include <string>

#include "cli/command.h"
#include "schedule/plan_file.h"

namespace shardwright {

// Throws UsageError for flags that are given and that no command knows of a pipeline, if the plan
// has one.
void RefuseWithPipeline(const Arguments& arguments, const Plan& plan,
                        std::initializer_list<const char*> flags);

// The answer of `simulate`; returns the exit code. A rank of each stage is in the file `trace`, if
// it is named. Throws UsageError for flags that it does not know of a pipeline.
int SimulatePipeline(const Arguments& arguments, const PlanFile& file, bool contention,
                     const std::string& trace);

// The actions of each rank, and its program: whole, or in numbers.
[[nodiscard]] std::string StagesText(const PlanFile& file, bool whole);

}  // namespace shardwright
