// The search for the fastest plan that fits: bounds first, then simulations where the bounds leave
// hope. docs/planning.md has the method.
//
// Example: a Llama with 2 layers on 4 A100s, global batch 16, fsdp2. The outer choices are the
// divisors of 4 for the shard size (1, 2, 4) and of 4 samples per rank for the micro-batch (1, 2,
// 4), each with its modes of synchronisation and offload. All are held against a bound of their
// time and memory.
//
//   SeedAll       simulates a few plans of each outer choice, in the order of their bounds, in
//                 batches of 8. A choice whose bound is above the best time so far is pruned: here
//                 no plan with micro-batch 2 is below 8.14 ms.
//   RefineBest    improves units, resharding, prefetch and checkpointing of the best few choices.
//   TrySeeds      adds the plans that users have without a search (torchtitan, accelerate, ...).
//   ChooseBest    asks the allocator's model about the fastest plans until one of them fits.
//
// The result: 7.13 ms, after 127 simulations, with a proof that no plan takes less than 7.0 ms.
//
// If the allocator refuses the fastest plans (fragmentation, retries), the search aims at 94 % of
// their memory and runs again, at most 4 times. All constants below trade time for quality only;
// none depends on the number of threads, so equal searches give equal plans.

#include "planner/search.h"

#include <array>
#include <chrono>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>

#include "core/budget.h"
#include "core/error.h"
#include "core/ranges.h"
#include "planner/branches.h"
#include "planner/choose.h"
#include "planner/evaluator.h"
#include "planner/seeds.h"

namespace shardwright {
namespace {

// How far what PyTorch reserves may lie above what is predicted: at most 1.9 % in 27 of the 28
// published figures that bench/accuracy.md compares, 7.4 % in one.
constexpr double kReservedSpread = 0.02;
constexpr double kMostMargin = 0.5;
constexpr int kMostRounds = 4;  // of aiming lower
constexpr double kLess = 0.94;  // each time
// How many branches are refined, and how many plans are simulated for each.
// The first round takes the 14 best branches with 28 simulations each, the second the 4 best then
// with 64. A brief search takes 2 and 1.
struct RefineRound {
  std::size_t branches = 0;
  std::int64_t effort = 0;
};
constexpr std::array<RefineRound, 2> kRefineRounds = {{{14, 28}, {4, 64}}};
constexpr RefineRound kRoundBelow = {6, 64};  // below what the allocator refused
// Of a search with little effort, which is to give a first answer within a second.
constexpr std::array<RefineRound, 2> kBriefRounds = {{{2, 8}, {1, 16}}};
constexpr RefineRound kBriefRoundBelow = {2, 16};
constexpr std::int64_t kBriefEffort = 50;
// Branches that are seeded before the incumbent is looked at again. A constant, so that the result
// does not depend on the number of threads.
constexpr std::size_t kBatch = 8;

bool IsRefused(const Candidate& c) {
  return c.status == CandidateStatus::kFragmented || c.status == CandidateStatus::kRetries;
}

class Searcher {
 public:
  Searcher(const Problem& input, const SearchOptions& options)
      : in_(input),
        options_(options),
        limits_{MemoryLimit(input, options), input.cluster.node.pinned_limit},
        workers_(input, options.threads),
        branches_(input, options, limits_, workers_),
        choose_{options,
                {branches_.space().blocks.begin(), branches_.space().blocks.end()},
                input.cluster.gpus_per_node},
        finals_(workers_, limits_.device) {}

  SearchResult Run() {
    SearchResult result = SearchBranches();
    for (int round = 0; round < kMostRounds && !result.is_feasible && AimLower(result); ++round) {
      branches_.Restart();
      spent_ = workers_.simulated();
      result = SearchBranches();
    }
    if ((!result.is_feasible || result.best.retries > 0) && SeedPruned()) {
      result = Choose();
    }
    SearchBelow(result);
    Report(result);
    return result;
  }

 private:
  SearchResult SearchBranches() {
    SeedAll();
    RefineBest();
    TrySeeds(branches_.Incumbent());
    return Choose();
  }

  // Lowers the memory target below the smallest plan that the allocator refused, or below a chosen
  // plan that retries. The target also leaves room for the bytes that the allocator reserves beyond
  // the chosen plan. Returns false if the target is that low already, or if no plan was refused.
  bool AimLower(const SearchResult& result) {
    double least = INFINITY;
    for (const Candidate& c : result.candidates) {
      least = IsRefused(c) ? std::min(least, static_cast<double>(c.memory.value)) : least;
    }
    if (result.is_feasible && result.best.retries > 0) {
      const Bytes memory = result.candidates[result.best.index].memory;
      least = std::min(least, static_cast<double>(memory.value));
    }
    if (std::isinf(least) || IsStopped()) {
      return false;
    }
    Bytes aim(std::llround(kLess * least));
    if (result.is_feasible) {
      const Candidate& chosen = result.candidates[result.best.index];
      aim = std::min(aim, limits_.device - (chosen.Needs() - chosen.memory));
    }
    if (aim >= branches_.aim()) {
      return false;
    }
    branches_.AimAt(aim);
    return true;
  }

  // Is a plan that the allocator refused, or did not see, faster than the chosen one by more than
  // the tie?
  // Example: the fastest plan takes 1.00 s but was refused, the chosen one takes 1.05 s. A smaller
  // plan of 1.02 s may exist, so branches are searched again below the refused plan's memory.
  [[nodiscard]] bool MayHideFaster(const SearchResult& result) const {
    if (!result.is_feasible || options_.objective == Objective::kMemory || options_.effort <= 0) {
      return false;
    }
    const double slowest = result.best.step_time.value / (1 + options_.tie);
    for (std::size_t i = 0; i < result.candidates.size(); ++i) {
      const Candidate& c = result.candidates[i];
      if ((IsRefused(c) && c.step_time.value < slowest) || IsPassedOver(options_, result, i)) {
        return true;
      }
    }
    return false;
  }

  // The most promising branches are searched again for plans that take less memory and are faster
  // than the chosen one by more than the tie, as long as the allocator refuses the fastest.
  void SearchBelow(SearchResult& result) {
    const RefineRound effort = IsBrief() ? kBriefRoundBelow : kRoundBelow;
    Branches::List list = branches_.order();
    for (int round = 0; round < kMostRounds && MayHideFaster(result) && AimLower(result); ++round) {
      KeepPromising(result.best.step_time.value / (1 + options_.tie), round == 0, list);
      list.resize(std::min(list.size(), effort.branches));
      if (list.empty()) {
        return;
      }
      branches_.Seed(list);
      std::erase_if(list, [&](std::size_t i) { return branches_[i].best() == nullptr; });
      branches_.Refine(list, effort.effort * EffortScale());
      TrySeeds(result.best.step_time.value);  // slower than what was refused
      result = Choose();
    }
  }

  // Keeps branches that may hold plans faster than `slowest` below the aim, by their bounds there
  // and, unless better ones may be found (`is_first`), by the best one so far; the best first.
  // The bounds are taken anew for the lower memory target: with less memory more must be
  // recomputed.
  void KeepPromising(double slowest, bool is_first, Branches::List& list) const {
    const auto hope = [&](std::size_t i) {
      const Evaluated* const best = branches_[i].best();
      return best != nullptr ? best->outcome.step_time.value : branches_.BoundOf(branches_[i]);
    };
    std::erase_if(list, [&](std::size_t i) {
      const CandidateStatus status = branches_[i].status;
      return (status != CandidateStatus::kFits && status != CandidateStatus::kPrunedTime) ||
             branches_.BoundOf(branches_[i]) >= slowest || (!is_first && hope(i) >= slowest);
    });
    const std::vector<OuterBound> bounds = branches_.BoundsAtAim(list);
    Branches::List promising;
    for (std::size_t i = 0; i < list.size(); ++i) {
      if (bounds[i].deficit == Bytes(0) && bounds[i].time.value < slowest) {
        promising.push_back(list[i]);
      }
    }
    list = std::move(promising);
    StableSort(list, [&](std::size_t x, std::size_t y) { return hope(x) < hope(y); });
  }

  [[nodiscard]] bool IsBrief() const { return options_.effort < kBriefEffort; }
  [[nodiscard]] bool IsStopped() const { return options_.stop != nullptr && options_.stop->load(); }

  // Looks for first plans in the order of bounds. The first batch is always simulated, and later
  // ones while `effort` lasts. As long as no plan fits at all, at least 200 simulations are
  // allowed. A branch that is hopeless when its turn comes is pruned without any simulation.
  void SeedAll() {
    constexpr std::int64_t kMostUntilOneFits = 200;  // where the search is to be short
    const Branches::List& order = branches_.order();
    for (std::size_t begin = 0; begin < order.size();) {
      const std::int64_t effort = std::isinf(branches_.Incumbent())
                                      ? std::max(options_.effort, kMostUntilOneFits)
                                      : options_.effort;
      Branches::List batch;
      for (; begin < order.size() && batch.size() < kBatch; ++begin) {
        Branch& branch = branches_[order[begin]];
        if (branch.status != CandidateStatus::kNotTried) {
          continue;
        }
        if (branches_.IsHopeless(branch)) {
          branch.status = CandidateStatus::kPrunedTime;
        } else if (!IsStopped() && (begin < kBatch || workers_.simulated() - spent_ < effort)) {
          batch.push_back(order[begin]);
        }
      }
      branches_.Seed(batch);
      Tell();
    }
  }

  // Seeds the branches that were pruned by time. This is for the case that the allocator then took
  // none of the faster plans. Returns false if no branch was pruned.
  bool SeedPruned() {
    const Branches::List pruned = branches_.With(CandidateStatus::kPrunedTime);
    if (pruned.empty() || IsStopped()) {
      return false;
    }
    branches_.Seed(pruned);
    TrySeeds(INFINITY);
    return true;
  }

  // Branches with a plan that fits, the best first. The best branch of each mesh and micro-batch
  // comes before all others: units and prefetch change much where communication matters. Branches
  // without offloading, with it, and with moments on the host count apart. Example: the five
  // fastest branches all have shard 8 and micro-batch 4. Only the first of them comes before the
  // best branch of shard 4.
  [[nodiscard]] Branches::List Ranked(std::size_t most) const {
    Branches::List ranked;
    const double worst = branches_.Incumbent() * (1 + options_.tie);
    for (std::size_t i = 0; i < branches_.size(); ++i) {
      if (branches_[i].best() != nullptr && branches_.BoundOf(branches_[i]) <= worst) {
        ranked.push_back(i);
      }
    }
    const auto cost = [&](std::size_t i) { return branches_.CostOf(branches_[i].best()->outcome); };
    StableSort(ranked, [&](std::size_t x, std::size_t y) { return cost(x) < cost(y); });
    std::set<std::tuple<std::int64_t, std::int64_t, bool, bool>> seen;
    std::stable_partition(ranked.begin(), ranked.end(), [&](std::size_t i) {
      const OuterChoice& outer = branches_[i].outer;
      const bool offloads = outer.offload != Offload();
      return seen.emplace(outer.shard_size, outer.micro_batch, offloads, outer.offload.moments)
          .second;
    });
    ranked.resize(std::min(ranked.size(), most));
    return ranked;
  }

  // Small models are simulated fast, so more of their plans are.
  // A model of 10 ops gets 10 times as many simulations, one of 6 ops or fewer 16 times, one of 100
  // ops or more gets no extra.
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
      branches_.Refine(Ranked(round.branches), round.effort * EffortScale());
      Tell();
    }
    // Symmetric plans are to be found where they tie: of small models in more branches and orders.
    const bool is_small = EffortScale() > 1;
    branches_.TryUniform(Ranked(is_small ? 4 : 1), is_small);
  }

  // Plans besides those of the branches, where no bound tells that they cost more than `incumbent`,
  // each once.
  void TrySeeds(double incumbent) {
    if (IsStopped() || options_.effort <= 0) {
      return;
    }
    std::vector<Candidate> seeds = SeedCandidates(in_, options_, branches_, incumbent);
    std::erase_if(seeds, [&](const Candidate& c) {
      return AnyOf(seeds_, [&](const Candidate& known) {
        return known.plan == c.plan && known.label == c.label;
      });
    });
    std::vector<char> is_allowed(seeds.size());
    workers_.ForEach(seeds.size(), [&](std::size_t i, Evaluator& evaluator) {
      const Outcome outcome = evaluator.Try(seeds[i].plan, limits_.device);
      is_allowed[i] = outcome.is_allowed ? 1 : 0;
      SetOutcome(outcome, limits_, seeds[i]);
    });
    for (std::size_t i = 0; i < seeds.size(); ++i) {
      if (is_allowed[i] != 0) {
        seeds_.push_back(std::move(seeds[i]));
      }
    }
  }

  void Tell() const {
    if (options_.progress) {
      const double incumbent = branches_.Incumbent();
      options_.progress({workers_.simulated(), Seconds(std::isfinite(incumbent) ? incumbent : 0.0),
                         branches_.LowerBound()});
    }
  }

  // Collects the candidates of all branches and the seeds, and lets ChooseBest pick one. Called
  // several times: the allocator's answers are kept in `finals_`, so no plan is asked for twice.
  SearchResult Choose() {
    SearchResult result;
    result.memory_limit = limits_.device;
    result.lower_bound = branches_.LowerBound();
    for (const std::size_t i : branches_.order()) {
      const Branch& branch = branches_[i];
      branches_.Append(branch, result.candidates);
      result.pruned_by_memory += branch.status == CandidateStatus::kPrunedMemory ? 1 : 0;
      result.pruned_by_time += branch.status == CandidateStatus::kPrunedTime ? 1 : 0;
      result.is_complete = result.is_complete && branch.status != CandidateStatus::kNotTried;
    }
    result.candidates.insert(result.candidates.end(), seeds_.begin(), seeds_.end());
    result.is_complete = result.is_complete && !IsStopped();
    ChooseBest(choose_, finals_, result);
    return result;
  }

  void Report(SearchResult& result) {
    if (!result.is_feasible && options_.effort > 0) {
      FindFloor(result);
    }
    if (result.is_feasible && options_.effort > 0 && !IsBrief()) {
      MeasureFront(choose_, finals_, result);
    }
    if (const std::string refusal = result.is_feasible ? "" : branches_.Refusal();
        !refusal.empty()) {
      throw InputError(refusal);
    }
    FindPareto(choose_, result);
    SumUpRejected(options_, result);
    result.simulated = workers_.simulated();
  }

  // For the message of a job that does not fit: the plan that misses least, and the parts of its
  // peak. The branch with the largest shard size, and of those the one with the least bound, is
  // simulated now if it was not. O(candidates) and a few simulations.
  void FindFloor(SearchResult& result) {
    const auto key = [](const Branch& b) {
      return std::tuple(-b.outer.shard_size, b.bound.memory, b.bound.memory_at_turn);
    };
    const auto least =
        std::min_element(branches_.begin(), branches_.end(),
                         [&](const Branch& x, const Branch& y) { return key(x) < key(y); });
    if (least->local == nullptr) {
      branches_.AimAt(limits_.device);
      branches_.Seed({static_cast<std::size_t>(least - branches_.begin())});
      branches_.Append(*least, result.candidates);
    }
    const Candidate* floor = nullptr;
    Bytes host_deficit(0);
    for (const Candidate& c : result.candidates) {
      if (c.memory > Bytes(0) &&
          (floor == nullptr ||
           std::tie(c.deficit, c.memory) < std::tie(floor->deficit, floor->memory))) {
        floor = &c;
      }
      if (c.status == CandidateStatus::kOverHost) {
        host_deficit = host_deficit > Bytes(0) ? std::min(host_deficit, c.deficit) : c.deficit;
      }
    }
    if (floor != nullptr) {
      const Outcome outcome = workers_.first().Try(floor->plan);
      result.floor = {*floor, outcome.device_peak, outcome.outside, host_deficit};
      result.floor.candidate.step_time = outcome.step_time;
    }
  }

  const Problem& in_;
  const SearchOptions& options_;
  Limits limits_;
  Workers workers_;
  Branches branches_;
  ChooseInput choose_;
  Finals finals_;
  std::vector<Candidate> seeds_;  // that were simulated
  std::int64_t spent_ = 0;        // simulations before branches were searched again
};

}  // namespace

SearchResult Search(const Problem& input, const SearchOptions& options) {
  if (options.base.keeps_gathered) {  // fewer gathers than bounds count
    throw InputError("plan: keeps_gathered (--reshard step)", "true", "false in a search");
  }
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

Bytes MemoryLimit(const Problem& input, const SearchOptions& options) {
  return options.memory_limit > Bytes(0) ? options.memory_limit : UsableMemory(input);
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
