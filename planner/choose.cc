#include "planner/choose.h"

#include <algorithm>
#include <tuple>

namespace shardwright {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// The candidate that the objective prefers, by what is known of its time; kNone: none fits.
std::size_t Preferred(const SearchOptions& options, std::int64_t ranks_per_node,
                      const std::vector<Candidate>& candidates) {
  const bool by_memory = options.objective == Objective::kMemory;
  double fastest = 0;
  for (const Candidate& c : candidates) {
    if (c.status == CandidateStatus::kFits) {
      fastest = fastest == 0 ? c.step_time.value : std::min(fastest, c.step_time.value);
    }
  }
  std::size_t best = kNone;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    const bool is_fast = by_memory || c.step_time.value <= fastest * (1 + options.tie);
    if (c.status != CandidateStatus::kFits || !is_fast) {
      continue;
    }
    // Offloading is more to go wrong; page-locked host memory counts as memory.
    const auto key = [&](const Candidate& x) {
      const int offloads = static_cast<int>(x.plan.offload.parameters) +
                           static_cast<int>(x.plan.offload.optimizer) +
                           static_cast<int>(x.plan.offload.activations);
      return by_memory
                 ? std::tuple(0, x.memory, x.step_time)
                 : std::tuple(offloads, x.memory + x.host_memory / ranks_per_node, x.step_time);
    };
    if (best == kNone || key(c) < key(candidates[best])) {
      best = i;
    }
  }
  return best;
}

const char* ReasonOf(CandidateStatus status) {
  switch (status) {
    case CandidateStatus::kFits:
      return "slower";
    case CandidateStatus::kOverDevice:
    case CandidateStatus::kPrunedMemory:
      return "memory";
    case CandidateStatus::kOverHost:
      return "host memory";
    case CandidateStatus::kFragmented:
      return "fragmentation";
    case CandidateStatus::kPrunedTime:
      return "bound";
    case CandidateStatus::kNotTried:
      return "not tried";
  }
  return "";
}

}  // namespace

void ChooseBest(const SearchOptions& options, Evaluator& evaluator, SearchResult& result) {
  // The allocator's retries delay the host: a plan near the limit may turn out slower, or not fit.
  constexpr int kMostTries = 32;
  const std::int64_t ranks_per_node = evaluator.ranks_per_node();
  for (int attempt = 0; attempt < kMostTries; ++attempt) {
    const std::size_t index = Preferred(options, ranks_per_node, result.candidates);
    if (index == kNone) {
      return;
    }
    Candidate& chosen = result.candidates[index];
    const Evaluator::Final final = evaluator.RunFinal(chosen.plan);
    if (final.out_of_memory || final.placed + final.outcome.outside > result.memory_limit) {
      chosen.status = CandidateStatus::kFragmented;
      continue;
    }
    const bool is_slower = final.outcome.time.value > chosen.step_time.value * (1 + 1e-9);
    chosen.step_time = final.outcome.time;
    if (is_slower && attempt + 1 < kMostTries &&
        Preferred(options, ranks_per_node, result.candidates) != index) {
      continue;
    }
    result.is_feasible = true;
    result.best = {index,
                   chosen.plan,
                   chosen.step_time,
                   final.outcome.peak,
                   final.outcome.outside,
                   final.reserved,
                   chosen.host_memory};
    result.lower_bound = std::min(result.lower_bound, chosen.step_time);
    result.proven_gap =
        (chosen.step_time.value - result.lower_bound.value) / chosen.step_time.value;
    return;
  }
}

void FindPareto(SearchResult& result) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < result.candidates.size(); ++i) {
    if (result.candidates[i].status == CandidateStatus::kFits) {
      order.push_back(i);
    }
  }
  const auto key = [&](std::size_t i) {
    return std::tie(result.candidates[i].step_time, result.candidates[i].memory);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return key(x) < key(y); });
  for (const std::size_t i : order) {
    if (result.pareto.empty() ||
        result.candidates[i].memory < result.candidates[result.pareto.back()].memory) {
      result.pareto.push_back(i);
    }
  }
}

void SumUpRejected(SearchResult& result) {
  for (std::size_t i = 0; i < result.candidates.size(); ++i) {
    const Candidate& c = result.candidates[i];
    if (result.is_feasible && i == result.best.index) {
      continue;
    }
    const std::string reason = ReasonOf(c.status);
    auto row = std::find_if(
        result.rejected.begin(), result.rejected.end(),
        [&](const RejectedFamily& r) { return r.family == c.family && r.reason == reason; });
    if (row == result.rejected.end()) {
      result.rejected.push_back({c.family, reason, 0, Seconds(0), c.bound, c.deficit});
      row = result.rejected.end() - 1;
    }
    ++row->count;
    row->bound = std::min(row->bound, c.bound);
    row->least_deficit = std::min(row->least_deficit, c.deficit);
    if (c.step_time.value > 0 && (row->best_time.value == 0 || c.step_time < row->best_time)) {
      row->best_time = c.step_time;
    }
  }
}

}  // namespace shardwright
