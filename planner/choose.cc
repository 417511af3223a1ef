// Which of the simulated candidates is the answer, and why the others are not.
//
// Example, with a tie of 1 %. Times are simulated without the caching allocator.
//
//   plan   time      offloads   symmetric   memory
//   A      1.000 s   optimizer  yes         30 GiB
//   B      1.004 s   nothing    no          60 GiB
//   C      1.006 s   nothing    yes         62 GiB
//   D      1.030 s   nothing    yes         40 GiB
//
// A, B and C count as equally fast. B and C offload less than A. C treats all blocks alike and B
// does not, and B is not 1 % faster than C, so C is preferred. The allocator then sees C. If C fits
// and its time stands, C is chosen. If fragmentation leaves no room, C becomes kFragmented and the
// rule runs again. After two such disappointments candidates with as much memory as C are passed
// over: the allocator would most likely refuse them, too, and each question costs a long replay.
//
// D is slower by more than the tie, so its smaller memory does not count.

#include "planner/choose.h"

#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/plan_names.h"

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
// Example: 8 blocks in units of 3, 3 and 2 are symmetric, in units of 3, 2 and 3 they are not. With
// "full" in all 8 blocks they are symmetric, with "full" in the first 5 they are not.
bool IsSymmetric(const Plan& plan, const std::set<std::string>& blocks) {
  std::size_t grouped = 0, each = 0, last = 0;
  const Reshard* reshard = nullptr;
  for (const UnitPlan& unit : plan.units) {
    const auto count = static_cast<std::size_t>(
        CountIf(unit.modules, [&](const std::string& module) { return blocks.contains(module); }));
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
  return regions.empty() ||
         (regions.size() == blocks.size() && AllOf(regions, [&](const auto& entry) {
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
    return std::tuple(candidates[i].Needs(), candidates[i].step_time);
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
// `symmetric` holds the best time of symmetric plans with at most 0, 1, 2 and 3 offloads.
// O(candidates).
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
                      c.Needs() + c.host_memory / in.ranks_per_node, c.step_time);
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
// A previous plan wins as long as no plan is better by more than the tie. So a small change of the
// profile does not move a running job to another plan. Otherwise memory decides under kMemory, and
// PreferredTie under all other objectives. Under those the chosen plan is never slower than the
// best baseline.
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

std::string_view ReasonOf(CandidateStatus status) {
  // In the order of CandidateStatus.
  constexpr std::array<std::string_view, 8> kReasons = {
      "slower", "memory", "host memory", "fragmentation", "allocator retries",
      "memory", "bound",  "not tried"};
  return NameIn(kReasons, status);
}

std::string Percent(double fraction) {
  return Fixed(100 * fraction, "%.2g %%");
}

// Why a plan of the front that is faster than the chosen one was not chosen.
std::string WhyNot(const Candidate& c, const Candidate& chosen, bool c_is_symmetric,
                   const SearchOptions& options) {
  const double saved = chosen.step_time.value - c.step_time.value;
  const std::string gain = Percent(saved / chosen.step_time.value) + " faster";
  if (options.objective == Objective::kMemory) {
    return gain + ", but needs more memory";
  }
  if (chosen.is_previous) {
    return gain + ", which is not enough to change the plan of --keep";
  }
  if (CountOf(c.plan.offload) > CountOf(chosen.plan.offload)) {
    return gain + ", but offloads more";
  }
  if (!c_is_symmetric) {
    return gain + ", but treats the blocks unequally";
  }
  return gain + ", but needs " + Format(c.Needs() - chosen.Needs()) + " more";
}

// Sets the candidate's status once the allocator has seen it. If it does not fit, candidates with
// the same time and memory to the byte are refused as well: they are one program in other words,
// such as a prefetch list that repeats the default.
void Settle(const Outcome& final, std::size_t index, std::vector<Candidate>& candidates) {
  Candidate& seen = candidates[index];
  const Candidate told = seen;
  seen.needed = final.Needed();
  if (final.HasRoom()) {
    seen.step_time = final.step_time;
    seen.status = final.Retries() > 0 ? CandidateStatus::kRetries : seen.status;
    return;
  }
  for (Candidate& c : candidates) {
    const bool is_same = c.status == CandidateStatus::kFits && c.step_time == told.step_time &&
                         c.memory == told.memory && c.host_memory == told.host_memory;
    c.status = is_same ? CandidateStatus::kFragmented : c.status;
  }
  seen.status = CandidateStatus::kFragmented;
}

void SetBest(std::size_t index, const Outcome& final, SearchResult& result) {
  const Candidate& chosen = result.candidates[index];
  result.is_feasible = true;
  const Bytes reserved = std::max(final.reserved, final.device_peak.total);  // pipelines: allocated
  result.best = {index,    chosen.plan,     chosen.step_time,   final.device_peak, final.outside,
                 reserved, final.Retries(), chosen.host_memory, final.bubble};
  result.lower_bound = std::min(result.lower_bound, chosen.step_time);
  result.proven_gap = (chosen.step_time.value - result.lower_bound.value) / chosen.step_time.value;
}

}  // namespace

const Outcome* Finals::Find(const Plan& plan) const {
  const auto known = FindIf(known_, [&](const auto& entry) { return entry.first == plan; });
  return known == known_.end() ? nullptr : &known->second;
}

const Outcome& Finals::Of(const Plan& plan) {
  Ask({&plan});
  return *Find(plan);
}

void Finals::Ask(const std::vector<const Plan*>& plans) {
  std::vector<std::pair<Plan, Outcome>*> asked;
  for (const Plan* plan : plans) {
    if (Find(*plan) == nullptr) {
      asked.push_back(&known_.emplace_back(*plan, Outcome()));
    }
  }
  workers_.ForEach(asked.size(), [&](std::size_t i, Evaluator& evaluator) {
    asked[i]->second = evaluator.Run(asked[i]->first, OptionsWith(Telling::kUntilRetries));
  });
}

// Asks the allocator about the preferred candidate until one is confirmed: it fits, and its time
// did not rise. At most 32 new questions. If none is confirmed, or takes half as long again as the
// fastest plan with retries that was seen, that one is chosen, and its time is measured with all of
// its micro-batches. If there is none either, nothing fits.
void ChooseBest(const ChooseInput& in, Finals& finals, SearchResult& result) {
  // The allocator's retries delay the host: a plan near the limit may turn out slower, or not fit.
  // The time of a plan that was looked at is final. After a few disappointments plans with as much
  // memory are passed over, since they would disappoint, too.
  constexpr int kMostTries = 32;  // of plans that the allocator has not seen before
  // Arenas differ more from plan to plan than what the caching allocator takes.
  const int patience = FactsOf(in.options.base).has_arena ? 24 : 2;
  constexpr double kLess = 0.98;
  std::map<std::size_t, Outcome> seen;
  Symmetry is_symmetric(in.blocks, result.candidates);
  double most_memory = INFINITY;
  int disappointments = 0;
  std::size_t confirmed = kNone;
  for (int tries = 0; tries < kMostTries;) {
    const auto is_eligible = [&](std::size_t i) {
      const Candidate& c = result.candidates[i];
      return c.status == CandidateStatus::kFits &&
             (seen.contains(i) ||
              (tries + 1 < kMostTries &&
               (!c.baseline.empty() || static_cast<double>(c.memory.value) <= most_memory)));
    };
    const std::size_t index = Preferred(in, result.candidates, is_symmetric, is_eligible);
    if (index == kNone) {
      break;
    }
    Candidate& chosen = result.candidates[index];
    if (seen.contains(index)) {
      confirmed = index;
      break;
    }
    const Candidate told = chosen;
    tries += finals.Knows(chosen.plan) ? 0 : 1;
    const Outcome& final = seen[index] = finals.Of(chosen.plan);
    Settle(final, index, result.candidates);
    if (chosen.status == CandidateStatus::kFits &&
        chosen.step_time.value <= told.step_time.value * (1 + 1e-9)) {
      confirmed = index;
      break;
    }
    if (++disappointments >= patience) {
      most_memory = std::min(most_memory, kLess * static_cast<double>(told.memory.value));
    }
  }
  // Better one that retries than none, or than one that is far slower.
  constexpr double kRetriesGain = 1.5;
  std::size_t best = kNone;
  for (const auto& [i, final] : seen) {
    const Candidate& c = result.candidates[i];
    if (c.status == CandidateStatus::kRetries &&
        (best == kNone || c.step_time < result.candidates[best].step_time)) {
      best = i;
    }
  }
  if (confirmed != kNone &&
      (best == kNone || !in.options.takes_retries ||
       kRetriesGain * result.candidates[best].step_time > result.candidates[confirmed].step_time)) {
    SetBest(confirmed, seen.at(confirmed), result);
  } else if (best != kNone) {
    Candidate& chosen = result.candidates[best];
    const Outcome final = finals.Exactly(chosen.plan);
    Settle(final, best, result.candidates);
    chosen.status = CandidateStatus::kFits;
    SetBest(best, final, result);
  }
}

namespace {

// Of the candidates that fit and that `counts` takes, those that no other beats; by time.
// Sorted by time, each member needs less memory than all members before it. O(n log n).
template <class Counts>
std::vector<std::size_t> FrontOf(const std::vector<Candidate>& candidates, Counts counts) {
  std::vector<std::size_t> order, front;
  for (std::size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].status == CandidateStatus::kFits && counts(candidates[i])) {
      order.push_back(i);
    }
  }
  const auto key = [&](std::size_t i) {
    return std::tuple(candidates[i].step_time, candidates[i].Needs());
  };
  StableSort(order, [&](std::size_t x, std::size_t y) { return key(x) < key(y); });
  for (const std::size_t i : order) {
    if (front.empty() || candidates[i].Needs() < candidates[front.back()].Needs()) {
      front.push_back(i);
    }
  }
  return front;
}

bool IsKnown(const Candidate& c) {
  return c.needed > Bytes(0);
}

// The first rows of the front, and the last one, whose needs are not known.
std::vector<std::size_t> Unknown(const SearchResult& result) {
  constexpr std::size_t kMostRows = 8;
  std::vector<std::size_t> rows = FrontOf(result.candidates, [](const Candidate&) { return true; });
  if (rows.size() > kMostRows) {
    rows[kMostRows - 1] = rows.back();
    rows.resize(kMostRows);
  }
  std::erase_if(rows, [&](std::size_t i) { return IsKnown(result.candidates[i]); });
  return rows;
}

}  // namespace

bool IsPassedOver(const SearchOptions& options, const SearchResult& result, std::size_t i) {
  const Candidate& c = result.candidates[i];
  return result.is_feasible && c.status == CandidateStatus::kFits && !IsKnown(c) &&
         c.step_time.value * (1 + options.tie) < result.best.step_time.value;
}

// The front is drawn with the memory that plans really need, reserved bytes included. So at most 8
// plans of it are given to the allocator, in at most 3 rounds, and the choice is made anew: a tie
// may go to another plan now that needs are known.
void MeasureFront(const ChooseInput& in, Finals& finals, SearchResult& result) {
  constexpr int kMostRounds = 3;  // what turns out not to fit makes room for others
  const bool has_retries = result.best.retries > 0;
  for (int round = 0; round < kMostRounds; ++round) {
    const std::vector<std::size_t> rows = Unknown(result);
    if (rows.empty() || (in.options.stop != nullptr && in.options.stop->load())) {
      break;
    }
    std::vector<const Plan*> plans =
        Mapped<const Plan*>(rows, [&](const std::size_t i) { return &result.candidates[i].plan; });
    finals.Ask(plans);
    for (const std::size_t i : rows) {
      Settle(finals.Of(result.candidates[i].plan), i, result.candidates);
    }
  }
  if (has_retries) {
    return;
  }
  // The same rule, now that needs are known.
  Symmetry is_symmetric(in.blocks, result.candidates);
  const std::size_t index = Preferred(in, result.candidates, is_symmetric, [&](std::size_t i) {
    return result.candidates[i].status == CandidateStatus::kFits && IsKnown(result.candidates[i]);
  });
  if (index == result.best.index || index == kNone) {
    return;
  }
  Candidate& other = result.candidates[index];
  const Candidate told = other;
  const Outcome& final = finals.Of(other.plan);
  Settle(final, index, result.candidates);
  if (other.status == CandidateStatus::kFits && other.step_time <= told.step_time) {
    SetBest(index, final, result);
  }
}

void FindPareto(const ChooseInput& in, SearchResult& result) {
  result.pareto = FrontOf(result.candidates, IsKnown);
  if (!result.is_feasible) {
    return;
  }
  Symmetry is_symmetric(in.blocks, result.candidates);
  const Candidate& chosen = result.candidates[result.best.index];
  const auto place = FindIf(result.pareto, [&](std::size_t i) {
    return result.candidates[i].step_time >= chosen.step_time;
  });
  const bool is_there = IsIn(result.pareto, result.best.index);
  if (!is_there) {
    result.pareto.insert(place, result.best.index);
  }
  for (const std::size_t i : result.pareto) {
    Candidate& c = result.candidates[i];
    c.why_not =
        c.step_time < chosen.step_time ? WhyNot(c, chosen, is_symmetric(i), in.options) : "";
  }
}

// One row per family and reason, in the order of candidates: how many, the best time, the least
// bound and the least deficit. Example: family "ddp", reason "bound", 4 candidates, least bound
// 8.14 ms.
void SumUpRejected(const SearchOptions& options, SearchResult& result) {
  for (std::size_t i = 0; i < result.candidates.size(); ++i) {
    const Candidate& c = result.candidates[i];
    if (result.is_feasible && i == result.best.index) {
      continue;
    }
    const bool is_faster = c.status == CandidateStatus::kFits && result.is_feasible &&
                           c.step_time < result.candidates[result.best.index].step_time;
    const std::string reason = IsPassedOver(options, result, i) ? "close to the limit"
                               : is_faster                      ? "within " + Percent(options.tie)
                                                                : std::string(ReasonOf(c.status));
    auto row = FindIf(result.rejected, [&](const RejectedFamily& r) {
      return r.family == c.family && r.reason == reason;
    });
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
