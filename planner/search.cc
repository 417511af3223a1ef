#include "planner/search.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "core/budget.h"
#include "core/error.h"
#include "planner/bounds.h"
#include "planner/choose.h"
#include "planner/evaluate.h"
#include "planner/evaluator.h"
#include "planner/local.h"
#include "planner/measure.h"
#include "planner/seeds.h"
#include "planner/space.h"

namespace shardwright {
namespace {

// One outer choice on its way through the search.
struct Branch {
  OuterChoice outer;
  OuterBound bound;
  CandidateStatus status = CandidateStatus::kNotTried;
  std::unique_ptr<LocalSearch> local;                      // once it is simulated
  std::vector<std::unique_ptr<LocalSearch>> earlier = {};  // that were fitted to more memory
};

// Bounds are taken over a few rates of transfers out of a continuum; where transfers share links,
// this much may be missed between.
constexpr double kBoundSlack = 2e-4;
// How far what PyTorch reserves may lie above what is predicted: at most 1.9 % in 27 of the 28
// published figures that bench/accuracy.md compares, 7.4 % in one.
constexpr double kReservedSpread = 0.02;
constexpr double kMostMargin = 0.5;
constexpr int kMostRounds = 4;  // of aiming lower
constexpr double kLess = 0.94;  // each time
// How many branches are refined, and how many plans are simulated for each.
struct RefineRound {
  std::size_t branches = 0;
  std::int64_t effort = 0;
};
constexpr std::array<RefineRound, 2> kRefineRounds = {{{14, 28}, {4, 64}}};
// Of a search with little effort, which is to give a first answer within a second.
constexpr std::array<RefineRound, 2> kBriefRounds = {{{2, 8}, {1, 16}}};
constexpr std::int64_t kBriefEffort = 50;
// Branches that are seeded before the incumbent is looked at again. A constant, so that the result
// does not depend on the number of threads.
constexpr std::size_t kBatch = 8;

class Searcher {
 public:
  Searcher(const SearchInput& input, const SearchOptions& options)
      : in_(input),
        options_(options),
        limits_{MemoryLimit(input, options), input.cluster.node.pinned_limit},
        aim_(limits_),
        space_(MakeSpace(input, options)),
        choose_{options, {space_.blocks.begin(), space_.blocks.end()}, input.cluster.gpus_per_node},
        workers_(input, options.threads) {}

  SearchResult Run() {
    FindBounds();
    SearchResult result = SearchBranches();
    for (int round = 0; round < kMostRounds && AimLower(result); ++round) {
      result = SearchBranches();
    }
    if ((!result.is_feasible || result.best.retries > 0) && SeedPruned()) {
      result = Choose();
    }
    if (SearchBelow(result)) {
      result = Choose();
    }
    Report(result);
    return result;
  }

 private:
  SearchResult SearchBranches() {
    SeedAll();
    RefineBest();
    TrySeeds(Incumbent());
    return Choose();
  }

  // Where the allocator finds no room for faster plans, the most promising branches are searched
  // again for plans that take less than those. False: there are none.
  bool SearchBelow(const SearchResult& result) {
    constexpr std::int64_t kEffort = 64;
    if (!result.is_feasible || options_.objective == Objective::kMemory || IsStopped() ||
        options_.effort <= 0) {
      return false;
    }
    const double slowest = result.best.step_time.value / (1 + options_.tie);
    double least = INFINITY;  // that the allocator refused
    bool any_faster = false;
    for (std::size_t i = 0; i < result.candidates.size(); ++i) {
      const Candidate& c = result.candidates[i];
      const bool is_refused =
          c.status == CandidateStatus::kFragmented || c.status == CandidateStatus::kRetries;
      least = is_refused ? std::min(least, static_cast<double>(c.memory.value)) : least;
      any_faster = any_faster || (is_refused && c.step_time.value < slowest) ||
                   IsPassedOver(options_, result, i);
    }
    if (std::isinf(least) || !any_faster) {
      return false;
    }
    aim_.device = std::min(aim_.device, Bytes(std::llround(kLess * least)));
    const std::vector<std::size_t> promising = Promising(slowest);
    workers_.ForEach(promising.size(), [&](std::size_t i, Evaluator& evaluator) {
      Branch& branch = branches_[promising[i]];
      branch.status = CandidateStatus::kFits;
      if (branch.local != nullptr) {
        branch.earlier.push_back(std::move(branch.local));
      }
      branch.local = NewLocal(branch);
      branch.local->Seed(evaluator);
      if (branch.local->best() != nullptr) {
        branch.local->Refine(evaluator, (IsBrief() ? kEffort / 4 : kEffort) * EffortScale());
        branch.local->TrySymmetric(evaluator);
      }
    });
    seeds_.clear();  // some were left out for being slower than what was refused
    TrySeeds(result.best.step_time.value);
    return true;
  }

  // Branches that may hold plans faster than `slowest`, by the best one so far, or by their bounds.
  [[nodiscard]] std::vector<std::size_t> Promising(double slowest) const {
    const std::size_t most = IsBrief() ? 2 : 6;
    std::vector<std::size_t> promising;
    for (const std::size_t i : order_) {
      const CandidateStatus status = branches_[i].status;
      if ((status == CandidateStatus::kFits || status == CandidateStatus::kPrunedTime) &&
          SortKey(branches_[i]) < slowest) {
        promising.push_back(i);
      }
    }
    const auto hope = [&](std::size_t i) {
      const Branch& branch = branches_[i];
      const bool has_plan = branch.local != nullptr && branch.local->best() != nullptr;
      return has_plan ? branch.local->best()->outcome.time.value : SortKey(branch);
    };
    std::stable_sort(promising.begin(), promising.end(),
                     [&](std::size_t x, std::size_t y) { return hope(x) < hope(y); });
    promising.resize(std::min(promising.size(), most));
    return promising;
  }

  // Where no plan fits, and some only since the allocator finds no room for their pieces: branches
  // are searched again for plans that take less. False: that is not what is in the way.
  bool AimLower(const SearchResult& result) {
    double least = INFINITY;
    for (const Candidate& c : result.candidates) {
      if (c.status == CandidateStatus::kFragmented) {
        least = std::min(least, static_cast<double>(c.memory.value));
      }
    }
    if (result.is_feasible || std::isinf(least) || IsStopped()) {
      return false;
    }
    aim_.device = std::min(aim_.device, Bytes(std::llround(kLess * least)));
    seeds_.clear();
    spent_ = workers_.simulated();
    for (Branch& branch : branches_) {
      branch.local.reset();
      if (branch.status != CandidateStatus::kPrunedMemory) {
        branch.status = CandidateStatus::kNotTried;
      }
    }
    return true;
  }

  void FindBounds() {
    for (const OuterChoice& outer : space_.outer) {
      measured_[outer.micro_batch];
      branches_.push_back({outer, {}, CandidateStatus::kNotTried, nullptr});
    }
    std::vector<std::int64_t> sizes;
    for (const auto& [micro_batch, measured] : measured_) {
      sizes.push_back(micro_batch);
    }
    workers_.ForEach(sizes.size(), [&](std::size_t i, Evaluator&) {
      measured_.at(sizes[i]) = Measure(in_, options_, space_, sizes[i]);
    });
    const Bounds bounds(in_, options_, limits_);
    // Branches with the same mesh share what their transfers do to kernels.
    std::map<std::tuple<std::int64_t, bool, bool>, std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < branches_.size(); ++i) {
      const OuterChoice& outer = branches_[i].outer;
      groups[{outer.shard_size, outer.offload.activations, outer.offload.moments}].push_back(i);
    }
    std::vector<std::vector<std::size_t>> tasks;
    for (auto& [key, group] : groups) {
      tasks.push_back(std::move(group));
    }
    workers_.ForEach(tasks.size(), [&](std::size_t i, Evaluator&) {
      const Occupancy occupancy = bounds.OccupancyOf(branches_[tasks[i].front()].outer, measured_);
      std::vector<double> prices;
      for (const std::size_t b : tasks[i]) {
        Branch& branch = branches_[b];
        branch.bound =
            bounds.Of(branch.outer, measured_.at(branch.outer.micro_batch), occupancy, prices);
        branch.bound.time = Seconds(branch.bound.time.value * (1 - kBoundSlack));
        if (branch.bound.deficit > Bytes(0)) {
          branch.status = CandidateStatus::kPrunedMemory;
        }
      }
    });
    for (std::size_t i = 0; i < branches_.size(); ++i) {
      order_.push_back(i);
    }
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t x, std::size_t y) {
      return SortKey(branches_[x]) < SortKey(branches_[y]);
    });
  }

  [[nodiscard]] double SortKey(const Branch& branch) const {
    return options_.objective == Objective::kMemory ? static_cast<double>(branch.bound.memory.value)
                                                    : branch.bound.time.value;
  }

  // What the objective minimises of the best plan so far that offloads at most so many things;
  // infinite without one.
  [[nodiscard]] double Incumbent(int offloads = kMostOffloads) const {
    double best = INFINITY;
    for (const Branch& branch : branches_) {
      if (branch.local != nullptr && branch.local->best() != nullptr &&
          CountOf(branch.outer.offload) <= offloads) {
        const Outcome& o = branch.local->best()->outcome;
        best = std::min(best, options_.objective == Objective::kMemory
                                  ? static_cast<double>(o.memory.value)
                                  : o.time.value);
      }
    }
    return best;
  }

  // No plan of the branch would be chosen: it is slower than the best one so far, or not faster by
  // the tie than one that offloads less.
  [[nodiscard]] bool IsHopeless(const Branch& branch) const {
    const double tie = 1 + options_.tie;
    const bool has_ties = options_.objective != Objective::kMemory;
    const int fewer = CountOf(branch.outer.offload) - 1;
    return SortKey(branch) > Incumbent() * tie ||
           (has_ties && SortKey(branch) * tie > Incumbent(fewer));
  }

  [[nodiscard]] bool IsBrief() const { return options_.effort < kBriefEffort; }
  [[nodiscard]] bool IsStopped() const { return options_.stop != nullptr && options_.stop->load(); }

  void SeedAll() {
    constexpr std::int64_t kMostUntilOneFits = 200;  // where the search is to be short
    for (std::size_t begin = 0; begin < order_.size();) {
      const double incumbent = Incumbent();
      const std::int64_t effort =
          std::isinf(incumbent) ? std::max(options_.effort, kMostUntilOneFits) : options_.effort;
      std::vector<std::size_t> batch;
      for (; begin < order_.size() && batch.size() < kBatch; ++begin) {
        Branch& branch = branches_[order_[begin]];
        if (branch.status != CandidateStatus::kNotTried) {
          continue;
        }
        if (IsHopeless(branch)) {
          branch.status = CandidateStatus::kPrunedTime;
        } else if (!IsStopped() && (begin < kBatch || workers_.simulated() - spent_ < effort)) {
          batch.push_back(order_[begin]);
        }
      }
      Seed(batch);
      Tell();
    }
  }

  void Seed(const std::vector<std::size_t>& batch) {
    workers_.ForEach(batch.size(), [&](std::size_t i, Evaluator& evaluator) {
      Branch& branch = branches_[batch[i]];
      branch.status = CandidateStatus::kFits;
      branch.local = NewLocal(branch);
      branch.local->Seed(evaluator);
    });
  }

  [[nodiscard]] std::unique_ptr<LocalSearch> NewLocal(const Branch& branch) const {
    return std::make_unique<LocalSearch>(
        in_, options_, space_, measured_.at(branch.outer.micro_batch), branch.outer, limits_, aim_);
  }

  // Branches were pruned since they are slower than plans of which the allocator takes none, as it
  // turned out. False: there are none.
  bool SeedPruned() {
    std::vector<std::size_t> pruned;
    for (const std::size_t i : order_) {
      if (branches_[i].status == CandidateStatus::kPrunedTime) {
        pruned.push_back(i);
      }
    }
    if (pruned.empty() || IsStopped()) {
      return false;
    }
    Seed(pruned);
    seeds_.clear();
    TrySeeds(INFINITY);
    return true;
  }

  // Branches with a plan that fits, the best first; the best of each mesh and micro-batch, without
  // offloading, with it, and with moments on the host, before all others, since units and prefetch
  // change much where communication matters.
  [[nodiscard]] std::vector<std::size_t> Ranked() const {
    std::vector<std::size_t> ranked;
    const double worst = Incumbent() * (1 + options_.tie);
    for (std::size_t i = 0; i < branches_.size(); ++i) {
      const Branch& branch = branches_[i];
      const bool has_plan = branch.local != nullptr && branch.local->best() != nullptr;
      if (has_plan && SortKey(branch) <= worst) {
        ranked.push_back(i);
      }
    }
    const auto cost = [&](std::size_t i) {
      const Outcome& o = branches_[i].local->best()->outcome;
      return options_.objective == Objective::kMemory ? static_cast<double>(o.memory.value)
                                                      : o.time.value;
    };
    std::stable_sort(ranked.begin(), ranked.end(),
                     [&](std::size_t x, std::size_t y) { return cost(x) < cost(y); });
    std::set<std::tuple<std::int64_t, std::int64_t, bool, bool>> seen;
    std::stable_partition(ranked.begin(), ranked.end(), [&](std::size_t i) {
      const OuterChoice& outer = branches_[i].outer;
      const bool offloads = outer.offload != Offload();
      return seen.emplace(outer.shard_size, outer.micro_batch, offloads, outer.offload.moments)
          .second;
    });
    return ranked;
  }

  // Small models are simulated fast, so more of their plans are.
  [[nodiscard]] std::int64_t EffortScale() const {
    constexpr std::int64_t kSmallOps = 100;
    constexpr std::int64_t kMost = 16;
    const std::int64_t ops = std::max<std::int64_t>(std::ssize(in_.model.ops), 1);
    return std::clamp<std::int64_t>(kSmallOps / ops, 1, kMost);
  }

  void RefineBest() {
    for (const RefineRound& round : IsBrief() ? kBriefRounds : kRefineRounds) {
      if (IsStopped() || options_.effort <= 0) {
        return;
      }
      std::vector<std::size_t> ranked = Ranked();
      ranked.resize(std::min(ranked.size(), round.branches));
      workers_.ForEach(ranked.size(), [&](std::size_t i, Evaluator& evaluator) {
        branches_[ranked[i]].local->Refine(evaluator, round.effort * EffortScale());
        branches_[ranked[i]].local->TrySymmetric(evaluator);
      });
      Tell();
    }
    // Symmetric plans are to be found where they tie: of small models in more branches and orders.
    const bool is_small = EffortScale() > 1;
    constexpr std::size_t kMostBranches = 4;
    std::vector<std::size_t> ranked = Ranked();
    ranked.resize(std::min<std::size_t>(ranked.size(), is_small ? kMostBranches : 1));
    workers_.ForEach(ranked.size(), [&](std::size_t i, Evaluator& evaluator) {
      branches_[ranked[i]].local->TryUniform(evaluator, is_small);
    });
  }

  // What users would have done, where the bound does not tell that it is worse than `incumbent`.
  void TrySeeds(double incumbent) {
    if (IsStopped() || options_.effort <= 0) {
      return;
    }
    for (SeedPlan& seed : SeedPlans(in_, options_)) {
      const auto branch = std::find_if(branches_.begin(), branches_.end(),
                                       [&](const Branch& b) { return Is(b.outer, seed.plan); });
      if (branch != branches_.end() && branch->status != CandidateStatus::kPrunedMemory &&
          SortKey(*branch) <= incumbent) {
        Candidate c = CandidateOf(*branch);
        c.label = "as " + seed.name + ": " + LabelOf(branch->outer);
        c.baseline = std::move(seed.name);
        c.plan = std::move(seed.plan);
        seeds_.push_back(std::move(c));
      }
    }
    AddPrevious();
    AddSimpler();
    std::vector<char> is_allowed(seeds_.size());
    workers_.ForEach(seeds_.size(), [&](std::size_t i, Evaluator& evaluator) {
      const Outcome outcome = evaluator.RunIfFits(seeds_[i].plan, limits_);
      is_allowed[i] = outcome.is_allowed ? 1 : 0;
      SetOutcome(outcome, limits_, seeds_[i]);
    });
    for (std::size_t i = seeds_.size(); i-- > 0;) {
      if (is_allowed[i] == 0) {
        seeds_.erase(seeds_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    }
  }

  void AddPrevious() {
    if (options_.previous == nullptr) {
      return;
    }
    const auto branch = std::find_if(branches_.begin(), branches_.end(), [&](const Branch& b) {
      return Is(b.outer, *options_.previous);
    });
    if (branch != branches_.end() && options_.previous->dialect == options_.base.dialect) {
      Candidate c = CandidateOf(*branch);
      c.label = "as before: " + LabelOf(branch->outer);
      c.plan = *options_.previous;
      c.is_previous = true;
      seeds_.push_back(std::move(c));
    }
  }

  // The fastest plan so far with one thing less offloaded: a tie would go to it.
  void AddSimpler() {
    const Branch* fastest = nullptr;
    for (const Branch& branch : branches_) {
      const bool has_plan = branch.local != nullptr && branch.local->best() != nullptr;
      if (has_plan && (fastest == nullptr ||
                       branch.local->best()->outcome.time < fastest->local->best()->outcome.time)) {
        fastest = &branch;
      }
    }
    if (fastest == nullptr || options_.objective == Objective::kMemory) {
      return;
    }
    const InnerChoice& inner = fastest->local->best()->inner;
    for (bool Offload::*part :
         {&Offload::parameters, &Offload::optimizer, &Offload::activations, &Offload::moments}) {
      Plan plan = fastest->local->PlanOf(inner);
      plan.offload.*part = false;
      const auto branch = std::find_if(branches_.begin(), branches_.end(),
                                       [&](const Branch& b) { return Is(b.outer, plan); });
      if (branch != branches_.end() && &*branch != fastest &&
          branch->status != CandidateStatus::kPrunedMemory) {
        Candidate c = CandidateOf(*branch);
        c.label = fastest->local->LabelOf(inner);
        c.plan = std::move(plan);
        seeds_.push_back(std::move(c));
      }
    }
  }

  void Tell() const {
    if (options_.progress) {
      const double incumbent = Incumbent();
      options_.progress({workers_.simulated(), Seconds(std::isfinite(incumbent) ? incumbent : 0.0),
                         LowerBound()});
    }
  }

  // Over all branches that may hold a plan that fits.
  [[nodiscard]] Seconds LowerBound() const {
    double least = INFINITY;
    for (const Branch& branch : branches_) {
      if (branch.status != CandidateStatus::kPrunedMemory) {
        least = std::min(least, branch.bound.time.value);
      }
    }
    return Seconds(std::isfinite(least) ? least : 0.0);
  }

  // What all plans of a branch share.
  [[nodiscard]] Candidate CandidateOf(const Branch& branch) const {
    Candidate c;
    c.family = FamilyName(branch.outer, options_);
    c.bound = branch.bound.time;
    c.memory_bound = branch.bound.memory;
    c.deficit = branch.bound.deficit;
    c.status = branch.status;
    return c;
  }

  void AppendCandidates(const Branch& branch, std::vector<Candidate>& candidates) const {
    Candidate c = CandidateOf(branch);
    if (branch.local == nullptr) {
      c.plan = OuterPlan(branch.outer, options_);
      c.label = LabelOf(branch.outer);
      candidates.push_back(std::move(c));
      return;
    }
    for (const std::unique_ptr<LocalSearch>& local : branch.earlier) {
      AppendCandidates(*local, c, candidates);
    }
    AppendCandidates(*branch.local, c, candidates);
  }

  void AppendCandidates(const LocalSearch& local, Candidate c,
                        std::vector<Candidate>& candidates) const {
    for (const Evaluated& e : local.evaluated()) {
      if (!e.outcome.is_allowed) {
        continue;
      }
      c.plan = local.PlanOf(e.inner);
      c.label = local.LabelOf(e.inner);
      SetOutcome(e.outcome, limits_, c);
      candidates.push_back(c);
    }
  }

  SearchResult Choose() {
    SearchResult result;
    result.memory_limit = limits_.device;
    result.lower_bound = LowerBound();
    for (const std::size_t i : order_) {
      const Branch& branch = branches_[i];
      AppendCandidates(branch, result.candidates);
      result.pruned_by_memory += branch.status == CandidateStatus::kPrunedMemory ? 1 : 0;
      result.pruned_by_time += branch.status == CandidateStatus::kPrunedTime ? 1 : 0;
      result.is_complete = result.is_complete && branch.status != CandidateStatus::kNotTried;
    }
    result.candidates.insert(result.candidates.end(), seeds_.begin(), seeds_.end());
    result.is_complete = result.is_complete && !IsStopped();
    ChooseBest(choose_, workers_.first(), result);
    return result;
  }

  void Report(SearchResult& result) {
    if (!result.is_feasible && options_.effort > 0) {
      FindFloor(result);
    }
    if (result.is_feasible && options_.effort > 0 && !IsBrief()) {
      MeasureFront(choose_, workers_, result);
    }
    FindPareto(choose_, result);
    SumUpRejected(options_, result);
    result.simulated = workers_.simulated();
  }

  // The least memory that was simulated. What is sharded most, and of that what has the least
  // bound, is simulated now if it was not.
  void FindFloor(SearchResult& result) {
    const auto least =
        std::min_element(branches_.begin(), branches_.end(), [](const Branch& x, const Branch& y) {
          const auto key = [](const Branch& b) {
            return std::tuple(-b.outer.shard_size, b.bound.memory, b.bound.memory_at_turn);
          };
          return key(x) < key(y);
        });
    if (least->local == nullptr) {
      least->local = std::make_unique<LocalSearch>(in_, options_, space_,
                                                   measured_.at(least->outer.micro_batch),
                                                   least->outer, limits_, limits_);
      least->local->Seed(workers_.first());
      AppendCandidates(*least, result.candidates);
    }
    const Candidate* floor = nullptr;
    for (const Candidate& c : result.candidates) {
      if (c.memory > Bytes(0) && (floor == nullptr || c.memory < floor->memory)) {
        floor = &c;
      }
    }
    if (floor != nullptr) {
      const Outcome outcome = workers_.first().Run(floor->plan);
      result.floor = {*floor, outcome.peak, outcome.outside};
      result.floor.candidate.step_time = outcome.time;
    }
  }

  const SearchInput& in_;
  const SearchOptions& options_;
  Limits limits_;
  Limits aim_;  // what plans are fitted to: less where the allocator needs room beside them
  Space space_;
  ChooseInput choose_;
  Workers workers_;
  std::map<std::int64_t, Measured> measured_;  // by micro-batch
  std::vector<Branch> branches_;
  std::vector<std::size_t> order_;  // branches by bound
  std::vector<Candidate> seeds_;    // that were simulated
  std::int64_t spent_ = 0;          // simulations before branches were searched again
};

}  // namespace

std::string_view NameOf(CandidateStatus status) {
  switch (status) {
    case CandidateStatus::kFits:
      return "fits";
    case CandidateStatus::kOverDevice:
      return "over device memory";
    case CandidateStatus::kOverHost:
      return "over host memory";
    case CandidateStatus::kFragmented:
      return "fragmented";
    case CandidateStatus::kRetries:
      return "allocator retries";
    case CandidateStatus::kPrunedMemory:
      return "pruned by memory";
    case CandidateStatus::kPrunedTime:
      return "pruned by time";
    case CandidateStatus::kNotTried:
      return "not tried";
  }
  return "";
}

SearchResult Search(const SearchInput& input, const SearchOptions& options) {
  // Each simulation costs by the op, and there are hundreds to thousands. 200 layers have 3,000.
  constexpr std::int64_t kMostOps = 20'000;
  Budget(input.model.name, "ops of a model to search plans for", kMostOps)
      .Take(std::ssize(input.model.ops));
  const auto begin = std::chrono::steady_clock::now();
  SearchResult result = Searcher(input, options).Run();
  result.search_time =
      Seconds(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  return result;
}

Bytes MemoryLimit(const SearchInput& input, const SearchOptions& options) {
  return options.memory_limit > Bytes(0) ? options.memory_limit
                                         : UsableMemory(input.cluster, input.job);
}

double DefaultMargin(const Cluster& cluster, const Profile& profile) {
  const MemoryProfile& memory = profile.memory;
  double outside = 0;
  for (const Number<Bytes>* number : {&memory.context, &memory.first_communicator}) {
    outside += static_cast<double>(number->value.value) * number->spread;
  }
  const auto usable = static_cast<double>(cluster.gpu.usable_memory.value.value);
  return std::min(kReservedSpread + outside / usable, kMostMargin);
}

}  // namespace shardwright
