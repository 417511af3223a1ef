#pragma once

// From simulated candidates to the chosen plan, the Pareto front and the reasons of the rest.

#include <cstdint>
#include <set>
#include <string>

#include "planner/evaluator.h"
#include "planner/search.h"

namespace shardwright {

struct ChooseInput {
  const SearchOptions& options;
  std::set<std::string> blocks;  // FQNs of the repeated blocks
  std::int64_t ranks_per_node = 1;
};

// Sets is_feasible, best, proven_gap, and the status of candidates that the caching allocator
// refuses. Of plans as fast as the fastest, within the tie, the one that offloads least, then those
// that treat all blocks alike, then the one with the least memory; the earlier one among equals.
void ChooseBest(const ChooseInput& in, Evaluator& evaluator, SearchResult& result);

void FindPareto(SearchResult& result);
void SumUpRejected(SearchResult& result);

}  // namespace shardwright
