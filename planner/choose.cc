#include "planner/choose.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/space.h"

namespace shardwright {
namespace {

constexpr std::size_t kNone = static_cast<std::size_t>(-1);

// The innermost block that a module is or lies in; empty: none.
std::string BlockOf(const std::set<std::string>& blocks, std::string module) {
  while (!blocks.contains(module)) {
    const std::size_t dot = module.rfind('.');
    if (dot == std::string::npos) {
      return "";
    }
    module.resize(dot);
  }
  return module;
}

// Are all blocks treated alike: as many in each unit (fewer in the last one), freed alike, and
// checkpointed alike?
bool IsSymmetric(const Plan& plan, const std::set<std::string>& blocks) {
  std::size_t grouped = 0, each = 0, last = 0;
  const Reshard* reshard = nullptr;
  for (const UnitPlan& unit : plan.units) {
    const auto count = static_cast<std::size_t>(
        std::count_if(unit.modules.begin(), unit.modules.end(),
                      [&](const std::string& module) { return blocks.contains(module); }));
    if (count == 0) {
      continue;
    }
    each = grouped == 0 ? count : each;
    const bool differs = (grouped > 0 && last != each) || count > each;
    if (differs || (reshard != nullptr && *reshard != unit.reshard)) {
      return false;
    }
    reshard = &unit.reshard;
    last = count;
    grouped += count;
  }
  if (grouped != 0 && grouped != blocks.size()) {
    return false;
  }
  std::map<std::string, std::vector<RecomputeRegion>> regions;
  for (RecomputeRegion region : plan.recompute) {
    const std::string block = BlockOf(blocks, region.module);
    region.module.erase(0, block.size());
    regions[block].push_back(std::move(region));
  }
  return regions.empty() || (regions.size() == blocks.size() &&
                             std::all_of(regions.begin(), regions.end(), [&](const auto& entry) {
                               return entry.second == regions.begin()->second;
                             }));
}

// Symmetry of candidates, looked at once each.
class Symmetry {
 public:
  Symmetry(const std::set<std::string>& blocks, const std::vector<Candidate>& candidates)
      : blocks_(blocks), candidates_(candidates), known_(candidates.size(), -1) {}

  [[nodiscard]] bool operator()(std::size_t i) {
    if (known_[i] < 0) {
      known_[i] = IsSymmetric(candidates_[i].plan, blocks_) ? 1 : 0;
    }
    return known_[i] != 0;
  }

 private:
  const std::set<std::string>& blocks_;
  const std::vector<Candidate>& candidates_;
  std::vector<signed char> known_;
};

// The eligible candidate with the least memory, then time; kNone: there is none.
template <class IsEligible>
std::size_t Smallest(const std::vector<Candidate>& candidates, IsEligible is_eligible) {
  std::size_t best = kNone;
  const auto key = [&](std::size_t i) {
    return std::tie(candidates[i].memory, candidates[i].step_time);
  };
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (is_eligible(i) && (best == kNone || key(i) < key(best))) {
      best = i;
    }
  }
  return best;
}

// Ties go to what offloads least, since that is more to go wrong, then to symmetric plans, then to
// the least memory; page-locked host memory counts. A plan that is not symmetric has to be faster
// than all symmetric ones that offload no more by the tie, also where another one, with more
// memory, is.
template <class IsEligible>
std::size_t PreferredTie(const ChooseInput& in, const std::vector<Candidate>& candidates,
                         Symmetry& is_symmetric, double fastest, double slowest,
                         IsEligible is_eligible) {
  const double tie = 1 + in.options.tie;
  std::array<double, kMostOffloads + 1> symmetric{};  // least time, by most offloads
  symmetric.fill(INFINITY);
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const double time = candidates[i].step_time.value;
    if (is_eligible(i) && time <= fastest * tie * tie && is_symmetric(i)) {
      for (int o = CountOf(candidates[i].plan.offload); o <= kMostOffloads; ++o) {
        auto& least = symmetric[static_cast<std::size_t>(o)];
        least = std::min(least, time);
      }
    }
  }
  const auto key = [&](std::size_t i) {
    const Candidate& c = candidates[i];
    return std::tuple(CountOf(c.plan.offload), is_symmetric(i) ? 0 : 1,
                      c.memory + c.host_memory / in.ranks_per_node, c.step_time);
  };
  std::size_t best = kNone, any = kNone;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const double time = candidates[i].step_time.value;
    if (!is_eligible(i) || time > slowest) {
      continue;
    }
    any = any == kNone || key(i) < key(any) ? i : any;
    const double rival = symmetric[static_cast<std::size_t>(CountOf(candidates[i].plan.offload))];
    if (is_symmetric(i) || time * tie < rival) {
      best = best == kNone || key(i) < key(best) ? i : best;
    }
  }
  return best == kNone ? any : best;  // none: the symmetric ones are slower than what is usual
}

// The eligible candidate that the objective prefers, by what is known of its time; kNone: there is
// none.
template <class IsEligible>
std::size_t Preferred(const ChooseInput& in, const std::vector<Candidate>& candidates,
                      Symmetry& is_symmetric, IsEligible is_eligible) {
  const SearchOptions& options = in.options;
  const bool by_memory = options.objective == Objective::kMemory;
  double fastest = INFINITY;
  double smallest = INFINITY;  // memory
  double usual = INFINITY;     // of what users would have done
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    if (is_eligible(i)) {
      fastest = std::min(fastest, c.step_time.value);
      smallest = std::min(smallest, static_cast<double>(c.memory.value));
      usual = c.baseline.empty() ? usual : std::min(usual, c.step_time.value);
    }
  }
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& c = candidates[i];
    const double cost = by_memory ? static_cast<double>(c.memory.value) : c.step_time.value;
    if (is_eligible(i) && c.is_previous &&
        cost <= (by_memory ? smallest : fastest) * (1 + options.tie)) {
      return i;
    }
  }
  if (by_memory) {
    return Smallest(candidates, is_eligible);
  }
  // A tie must not make the plan slower than what it is compared with.
  const double slowest = std::min(fastest * (1 + options.tie), std::max(usual, fastest));
  return PreferredTie(in, candidates, is_symmetric, fastest, slowest, is_eligible);
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

void ChooseBest(const ChooseInput& in, Evaluator& evaluator, SearchResult& result) {
  // The allocator's retries delay the host: a plan near the limit may turn out slower, or not fit.
  // The time of a plan that was looked at is final. After a few disappointments plans with as much
  // memory are passed over, since they would disappoint, too.
  constexpr int kMostTries = 32;
  // Arenas of native plans differ more from plan to plan than what the caching allocator takes.
  const int patience = in.options.base.dialect == Dialect::kNative ? 24 : 2;
  constexpr double kLess = 0.98;
  std::vector<char> is_final(result.candidates.size());
  Symmetry is_symmetric(in.blocks, result.candidates);
  double most_memory = INFINITY;
  int disappointments = 0;
  for (int attempt = 0; attempt < kMostTries; ++attempt) {
    const auto is_eligible = [&](std::size_t i) {
      const Candidate& c = result.candidates[i];
      return c.status == CandidateStatus::kFits &&
             (is_final[i] != 0 ||
              (attempt + 1 < kMostTries &&
               (!c.baseline.empty() || static_cast<double>(c.memory.value) <= most_memory)));
    };
    const std::size_t index = Preferred(in, result.candidates, is_symmetric, is_eligible);
    if (index == kNone) {
      return;
    }
    Candidate& chosen = result.candidates[index];
    const Evaluator::Final final = evaluator.RunFinal(chosen.plan);
    const bool is_fragmented =
        final.out_of_memory || final.placed + final.outcome.outside > result.memory_limit;
    const bool is_slower = final.outcome.time.value > chosen.step_time.value * (1 + 1e-9);
    const bool is_last = is_final[index] != 0 || (!is_fragmented && !is_slower);
    is_final[index] = 1;
    if (is_fragmented) {
      // What takes as long and as much memory is the same program in other words.
      for (Candidate& c : result.candidates) {
        const bool is_same = c.status == CandidateStatus::kFits &&
                             c.step_time == chosen.step_time && c.memory == chosen.memory &&
                             c.host_memory == chosen.host_memory;
        c.status = is_same && &c != &chosen ? CandidateStatus::kFragmented : c.status;
      }
      chosen.status = CandidateStatus::kFragmented;
    } else {
      chosen.step_time = final.outcome.time;
    }
    if (!is_last) {
      if (++disappointments >= patience) {
        most_memory = std::min(most_memory, kLess * static_cast<double>(chosen.memory.value));
      }
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
  result.pareto.clear();
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
