#pragma once

// Finds what would make a job fit that does not.
//
// Example: a global batch of 40 on one node of 8 GPUs. Two nodes have 16 GPUs, which do not divide
// 40, so the change that is tried is "--nodes 2 --global-batch 48".

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
// the software, the numbers, and last more nodes. The node counts tried are 2, 4, ... 64 times the
// present one, up to the first that helps. Each change costs a short search.
[[nodiscard]] std::vector<Fix> FindFixes(const Problem& input, const SearchOptions& options);

}  // namespace shardwright
