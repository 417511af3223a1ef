#pragma once

// Lists plans that the search tries besides those of its branches: what users would have done
// without planning, so that its result is never slower, and what would be simpler.
//
// Example: the fastest plan so far offloads parameters and optimizer states. One more candidate is
// that plan with its parameters on the device: within the tie it would win.

#include <string>
#include <vector>

#include "planner/branches.h"
#include "planner/search.h"

namespace shardwright {

struct SeedPlan {
  std::string name;  // "torchtitan, recompute full"
  Plan plan;
};

// The plans of the frameworks' defaults that agree with what is fixed: for native the units, batch
// and checkpointing of all of them, for another dialect those of frameworks that speak it. None
// where units, checkpointing or offloading are fixed.
[[nodiscard]] std::vector<SeedPlan> SeedPlans(const Problem& input, const SearchOptions& options);

// Candidates that were not simulated yet. They are the plans above, where no bound tells that they
// cost more than `incumbent`; SearchOptions::previous; and the fastest plan so far with one thing
// less offloaded, which would win a tie.
[[nodiscard]] std::vector<Candidate> SeedCandidates(const Problem& input,
                                                    const SearchOptions& options,
                                                    const Branches& branches, double incumbent);

}  // namespace shardwright
