#pragma once

// Explains why a plan was chosen: what each choice would cost if it were made differently, and what
// the step time hangs on. Everything is simulated.
//
// Example: the plan takes 1.00 s, and 0.94 s with a network that is a tenth faster: the sensitivity
// "network bandwidth" has a gain of 0.06.

#include <string>
#include <vector>

#include "planner/search.h"

namespace shardwright {

// The chosen plan with another value of one choice.
struct Alternative {
  std::string choice;  // "units", "reshard", "prefetch", "recompute", "offload", "shard size"...
  std::string value;   // "4 blocks"
  bool is_refitted = false;  // the rest was searched anew; else it is as chosen
  bool is_simulated = true;  // false: only the bound is known, which is above the chosen time
  bool fits = false;
  Seconds step_time;  // or the bound
  Bytes memory;
  Bytes deficit;  // what is missing, if it does not fit
};

// The chosen plan while something is a tenth faster: how much of the step time hangs on it.
struct Sensitivity {
  std::string what;  // "network bandwidth", "host launches", "GPU compute", "GPU memory bandwidth"
  double gain = 0;   // relative change of the step time, positive: faster
};

struct Explanation {
  // By choice in the order of docs/planning.md; of each the nearest: what fits first, by time, then
  // by what is missing.
  std::vector<Alternative> alternatives;
  std::vector<Sensitivity> sensitivities;  // the largest first
  std::vector<std::string> notes;          // what binds, in words
};

// Requires a feasible result of a search with the same arguments.
[[nodiscard]] Explanation ExplainChoice(const Problem& input, const SearchOptions& options,
                                        const SearchResult& result);

}  // namespace shardwright
