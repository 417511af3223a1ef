#pragma once

// What would make a job fit that does not.

#include <string>
#include <vector>

#include "planner/search.h"

namespace shardwright {

// One change of the job, the cluster or the fixed choices with which a plan fits; simulated.
struct Fix {
  std::string change;  // "recompute is free to choose", "--nodes 4", "--precision bf16"
  Seconds step_time;   // of a plan that fits then, not necessarily the fastest
  Bytes memory;        // its memory per GPU
  std::string label;   // its choices
};

// The changes that help, each by itself, cheapest first: choices that flags fix, then the dialect,
// the software, the numbers, and last more nodes (the fewest that do, as a power of two times the
// present number, at most 64 times). Each costs a short search.
[[nodiscard]] std::vector<Fix> FindFixes(const Problem& input, const SearchOptions& options);

}  // namespace shardwright
