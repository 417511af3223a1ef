#pragma once

// What users would have done without planning, as plans of the searched dialect: the search tries
// them too, so that its result is never slower.

#include <string>
#include <vector>

#include "planner/search.h"

namespace shardwright {

struct SeedPlan {
  std::string name;  // "torchtitan, recompute full"
  Plan plan;
};

// The plans of the frameworks' defaults that agree with what is fixed: for native the units, batch
// and checkpointing of all of them, for another dialect those of frameworks that speak it. None
// where units, checkpointing or offloading are fixed.
[[nodiscard]] std::vector<SeedPlan> SeedPlans(const SearchInput& input,
                                              const SearchOptions& options);

}  // namespace shardwright
