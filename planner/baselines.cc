// The plans that frameworks make by default, with the choices that their users try by hand.
//
// Example: torchtitan, 4 samples per rank. The micro-batches 1, 2 and 4, each without
// recomputation, with selective and with full recomputation, are 9 plans. All are simulated without
// the allocator, sorted (a plan that fits first, then the faster one), and the allocator sees them
// in this order until one fits.
//
// A larger micro-batch is skipped where a smaller one with the same checkpointing fails already and
// both accumulate at least 3 times.

#include "planner/baselines.h"

#include <utility>

#include "core/error.h"
#include "core/parallel.h"
#include "core/ranges.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower/optimizer.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// How many ranks read the same samples.
Mesh CutOf(const Model& model) {
  return {.tensor = model.tensor_ranks, .context = model.context_ranks};
}

constexpr std::int64_t kKeptLinears = 2;  // torchtitan's selective_ac_option "2"

// How each applies its framework. By value of Baseline.
struct BaselineRow {
  std::string_view name;
  Dialect dialect = Dialect::kDdp;
  std::string_view wrap = "root";
  bool checkpoints_selectively = false;  // by default; users try the other ways, too
  bool fuses_adam = false;               // by default (torchtitan's optimizer.implementation)
  bool syncs_last = false;               // accumulates without reducing
};
constexpr std::array<BaselineRow, kBaselines.size()> kRows = {{
    {.name = "fsdp1-size", .dialect = Dialect::kFsdp1, .wrap = "size:1e8"},
    {.name = "fsdp1-transformer", .dialect = Dialect::kFsdp1, .wrap = "block"},
    {.name = "torchtitan",
     .dialect = Dialect::kFsdp2,
     .wrap = "torchtitan",
     .checkpoints_selectively = true,
     .fuses_adam = true},
    {.name = "accelerate", .dialect = Dialect::kFsdp2, .wrap = "accelerate", .syncs_last = true},
    {.name = "zero3", .dialect = Dialect::kZero3, .wrap = "module"},
    {.name = "ddp"},
}};

const BaselineRow& RowOf(Baseline baseline) {
  return kRows[static_cast<std::size_t>(baseline)];
}

bool IsSet(const std::atomic<bool>* stop) {
  return stop != nullptr && stop->load();
}

struct BaselineCandidate {
  UserChoice choice;
  Plan plan;
  Outcome quick;  // without the caching allocator
};

// Fits first, then faster, then the smaller excess; earlier choices win ties.
bool IsBetter(const Outcome& a, const Outcome& b) {
  if (a.Fits() != b.Fits()) {
    return a.Fits();
  }
  return a.Fits() ? a.step_time < b.step_time : a.Excess() < b.Excess();
}

// A smaller micro-batch with the same checkpointing does not fit already, and has no peak that the
// larger one lacks: both have a first micro-batch, a last one and one between.
bool NeedsMoreThanOneThatFails(const std::vector<BaselineCandidate>& candidates,
                               const UserChoice& choice) {
  constexpr std::int64_t kAllKinds = 3;
  return choice.accumulation >= kAllKinds && AnyOf(candidates, [&](const BaselineCandidate& c) {
           return c.choice.recompute == choice.recompute &&
                  c.choice.micro_batch < choice.micro_batch && c.choice.accumulation >= kAllKinds &&
                  !c.quick.Fits();
         });
}

std::vector<BaselineCandidate> QuickCandidates(Baseline baseline, const Problem& problem,
                                               const std::vector<UserChoice>& choices,
                                               Bytes memory_limit, const std::atomic<bool>* stop,
                                               std::string& refusal) {
  std::vector<BaselineCandidate> candidates;
  for (const UserChoice& choice : choices) {
    if (IsSet(stop)) {
      refusal = "not looked at";
      return {};
    }
    if (NeedsMoreThanOneThatFails(candidates, choice)) {
      continue;
    }
    try {
      Plan plan = BaselinePlan(baseline, problem.model,
                               DataRanks(problem.cluster, CutOf(problem.model)), choice);
      if (FactsOf(plan).flat_units) {  // FSDP1's wrap policies do so unasked
        KeepFullPrecision(problem.model, problem.job.precision, plan);
      }
      Outcome quick = Evaluate(problem, plan,
                               {.reserved = false,
                                .telling = Telling::kRoughly,
                                .compares = true,
                                .memory_limit = memory_limit});
      candidates.push_back({choice, std::move(plan), std::move(quick)});
    } catch (const InputError& error) {
      if (refusal.empty()) {
        refusal = error.what();
      }
    }
  }
  StableSort(candidates, [](const BaselineCandidate& a, const BaselineCandidate& b) {
    return IsBetter(a.quick, b.quick);
  });
  return candidates;
}

BaselineResult EvaluateBaseline(Baseline baseline, Problem problem,
                                const std::vector<UserChoice>& choices, Bytes memory_limit,
                                const std::atomic<bool>* stop) {
  BaselineResult best;
  best.baseline = baseline;
  if (RowOf(baseline).fuses_adam) {
    const OptimizerSpec own = FusedFormOf(problem.job.optimizer);
    best.fuses_adam = own != problem.job.optimizer;
    problem.job.optimizer = own;
  }
  // The caching allocator is replayed for the most promising choices only, until one fits: it adds
  // little time, and what does not fit without it does not fit with it.
  for (const BaselineCandidate& candidate :
       QuickCandidates(baseline, problem, choices, memory_limit, stop, best.refusal)) {
    if ((best.outcome && !candidate.quick.Fits()) || IsSet(stop)) {
      break;
    }
    // An allocator that only fails takes long.
    Outcome outcome = Evaluate(problem, candidate.plan,
                               {.reserved = candidate.quick.Fits(),
                                .telling = Telling::kOnAverage,
                                .memory_limit = memory_limit});
    if (candidate.quick.Fits() && !outcome.Fits()) {  // the allocator fails in the midst of it
      outcome.step_time = candidate.quick.step_time;
      outcome.exposed_comm = candidate.quick.exposed_comm;
      outcome.rates = candidate.quick.rates;
    }
    if (!best.outcome || IsBetter(outcome, *best.outcome)) {
      best.choice = candidate.choice;
      best.plan = candidate.plan;
      best.outcome = outcome;
    }
    if (outcome.Fits()) {
      break;
    }
  }
  if (!best.outcome && best.refusal.empty()) {
    best.refusal = "not looked at";
  }
  if (best.outcome) {
    best.refusal = best.outcome->Fits() ? "" : best.outcome->misfits.front().text;
  }
  return best;
}

}  // namespace

std::string_view NameOf(Baseline baseline) {
  return RowOf(baseline).name;
}

std::string_view RecomputeName(const UserChoice& choice) {
  if (!choice.recompute) {
    return "none";
  }
  return *choice.recompute == RecomputeKind::kFull ? "full" : "selective";
}

Plan BaselinePlan(Baseline baseline, const Model& model, std::int64_t ranks,
                  const UserChoice& choice) {
  const BaselineRow& row = RowOf(baseline);
  const std::string where(row.name);
  Plan plan;
  plan.dialect = row.dialect;
  const DialectFacts& facts = FactsOf(plan);
  const bool shards = facts.mesh != MeshChoice::kReplicas;
  plan.shard_size = shards ? ranks * model.context_ranks : 1;
  plan.replicate_size = shards ? 1 : ranks * model.context_ranks;
  plan.micro_batch = choice.micro_batch;
  plan.accumulation = choice.accumulation;
  plan.units = Wrap(model, ParseWrap(std::string(row.wrap), where), {}, plan.dialect, where);
  if (baseline == Baseline::kTorchtitan) {  // who shares out experts, cuts layers and tokens
    for (const Parameter& param : model.params) {
      plan.expert_size = std::max(plan.expert_size, param.parts);
    }
    plan.tensor_size = model.tensor_ranks;
    plan.context_size = model.context_ranks;
    plan.context_method = model.context_method;
    AddExpertUnits(model, plan.units);
  }
  if (choice.recompute) {
    const bool is_selective = *choice.recompute == RecomputeKind::kSelective;
    plan.recompute =
        RecomputeBlocks(model, *choice.recompute, is_selective ? kKeptLinears : 1, where);
  }
  if (facts.flat_units) {
    // Off by default; flat parameters with frozen parts need it.
    plan.use_orig_params =
        AnyOf(model.params, [](const Parameter& param) { return !param.trainable; });
  }
  if (row.syncs_last && choice.accumulation > 1) {
    plan.sync = SyncMode::kLast;
  }
  return plan;
}

std::vector<UserChoice> UserChoices(Baseline baseline, JobMode mode, std::int64_t samples) {
  if (mode == JobMode::kForward) {
    return {{samples, 1, {}}};
  }
  std::vector<UserChoice> choices;
  for (std::int64_t micro = 1; micro <= samples && samples % micro == 0; micro *= 2) {
    const std::int64_t accumulation = samples / micro;
    choices.push_back({micro, accumulation, {}});
    if (RowOf(baseline).checkpoints_selectively) {
      choices.push_back({micro, accumulation, RecomputeKind::kSelective});
    }
    choices.push_back({micro, accumulation, RecomputeKind::kFull});
  }
  return choices;
}

std::vector<BaselineResult> EvaluateBaselines(Problem problem, std::optional<UserChoice> choice,
                                              Bytes memory_limit, int threads,
                                              const std::atomic<bool>* stop) {
  const std::int64_t ranks = DataRanks(problem.cluster, CutOf(problem.model));
  std::int64_t& global = problem.job.global_batch;
  global = choice ? ranks * choice->micro_batch * choice->accumulation : global;
  if (!choice && (global <= 0 || global % ranks != 0)) {
    throw InputError("global batch", std::to_string(global),
                     "a multiple of the " + std::to_string(ranks) + " ranks");
  }
  std::vector<BaselineResult> results(kBaselines.size());
  ParallelFor(kBaselines.size(), ThreadCount(threads), [&](std::size_t i, std::size_t) {
    const std::vector<UserChoice> choices =
        choice ? std::vector<UserChoice>{*choice}
               : UserChoices(kBaselines[i], problem.job.mode, global / ranks);
    results[i] = EvaluateBaseline(kBaselines[i], problem, choices, memory_limit, stop);
  });
  return results;
}

}  // namespace shardwright
