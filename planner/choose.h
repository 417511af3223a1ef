#pragma once

// Chooses one of the simulated candidates, and finds the Pareto front and why the rest was
// rejected.
//
// Example: plan A takes 1.000 s and offloads optimizer states, plan B takes 1.008 s without. With a
// tie of 1 % both are as fast as the fastest, so B is chosen: it offloads less. If the allocator
// finds no room for B, then B becomes kFragmented, and A is chosen.

#include <cstdint>
#include <deque>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "planner/evaluator.h"
#include "planner/search.h"

namespace shardwright {

struct ChooseInput {
  const SearchOptions& options;
  std::set<std::string> blocks;  // FQNs of the repeated blocks
  std::int64_t ranks_per_node = 1;
};

// The caching allocator's answers about plans (native: the arena's). Each plan is asked for once.
class Finals {
 public:
  // `workers` must outlive it.
  Finals(Workers& workers, Bytes limit) : workers_(workers), limit_(limit) {}

  [[nodiscard]] bool Knows(const Plan& plan) const { return Find(plan) != nullptr; }
  [[nodiscard]] const Outcome& Of(const Plan& plan);
  // Asks for all that are not known, on all threads.
  void Ask(const std::vector<const Plan*>& plans);
  // Of one that retries, with all of its micro-batches.
  [[nodiscard]] Outcome Exactly(const Plan& plan) {
    return workers_.first().Run(plan, OptionsWith(Telling::kProven));
  }

 private:
  [[nodiscard]] EvaluateOptions OptionsWith(Telling telling) const {
    return {.telling = telling, .memory_limit = limit_, .judges = false};
  }
  [[nodiscard]] const Outcome* Find(const Plan& plan) const;

  Workers& workers_;
  Bytes limit_;
  std::deque<std::pair<Plan, Outcome>> known_;
};

// Sets is_feasible, best, proven_gap, and the status of candidates that the caching allocator
// refuses, or takes only with retries: of these one is chosen where there is no other. Of plans as
// fast as the fastest, within the tie, the one that offloads least, then those that treat all
// blocks alike, then the one with the least memory; the earlier one among equals.
void ChooseBest(const ChooseInput& in, Finals& finals, SearchResult& result);

// Lets the caching allocator (native: the arena) say what the plans of the front need, and chooses
// anew among them.
void MeasureFront(const ChooseInput& in, Finals& finals, SearchResult& result);

void FindPareto(const ChooseInput& in, SearchResult& result);
void SumUpRejected(const SearchOptions& options, SearchResult& result);

// Is the candidate faster than the chosen plan by more than a tie, by a prediction without the
// allocator? The allocator was not asked about it, as it refused plans with as much memory.
[[nodiscard]] bool IsPassedOver(const SearchOptions& options, const SearchResult& result,
                                std::size_t i);

}  // namespace shardwright
