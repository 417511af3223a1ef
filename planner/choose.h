#pragma once

// From simulated candidates to the chosen plan, the Pareto front and the reasons of the rest.

#include "planner/evaluator.h"
#include "planner/search.h"

namespace shardwright {

// Sets is_feasible, best, proven_gap, and the status of candidates that the caching allocator
// refuses. Of plans as fast as the fastest, within the tie, the one that offloads least, then
// the one with the least memory; the earlier one among equals.
void ChooseBest(const SearchOptions& options, Evaluator& evaluator, SearchResult& result);

void FindPareto(SearchResult& result);
void SumUpRejected(SearchResult& result);

}  // namespace shardwright
