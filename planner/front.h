#pragma once

// Searches over searches: the whole front of time against memory, and the cheapest node count.
//
// Example of a front: the fastest plan needs 40 GiB, the smallest one 10 GiB. Seven more searches
// look below 10 x 4^(i/8) GiB: 11.9, 14.1, 16.8, 20, 23.8, 28.3 and 33.6.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "planner/search.h"

namespace shardwright {

// The fastest plan as Search finds it, with `pareto` filled up by searches under lower limits: the
// least memory at all, and memory limits in between that divide the range in equal ratios. Their
// plans that fit are among the candidates.
[[nodiscard]] SearchResult SearchFront(const Problem& input, const SearchOptions& options);

// One node count for a token budget.
struct NodeCountResult {
  std::int64_t nodes = 0;
  std::int64_t ranks = 0;
  std::optional<SearchResult> result;  // none: no plan can have this count; `refusal` says why
  std::string refusal;                 // also where nothing fits
  std::int64_t steps = 0;              // for the budget
  Seconds total;                       // steps x step time
  double gpu_hours = 0;

  [[nodiscard]] bool Fits() const { return result && result->is_feasible; }
};

// A search for each node count with the job's global batch. `tokens` counts images for image
// models.
[[nodiscard]] std::vector<NodeCountResult> SearchNodes(const Problem& input,
                                                       const SearchOptions& options,
                                                       const std::vector<std::int64_t>& node_counts,
                                                       std::int64_t tokens);

// The one with the fewest GPU-hours; among those within `tie` of it the one that is done first.
// None: nothing fits anywhere.
[[nodiscard]] std::optional<std::size_t> CheapestOf(const std::vector<NodeCountResult>& counts,
                                                    double tie);

}  // namespace shardwright
