// Plans that the search adds to its own: the frameworks' defaults, the previous plan, and the
// fastest plan with one thing less offloaded.
//
// Example: native takes any plan, so the defaults of all six baselines are seeds, each also with
// all units kept after forward. fsdp2 gets those of torchtitan and accelerate only. A seed whose
// branch has a bound above the incumbent is not simulated.

#include "planner/seeds.h"

#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "planner/baselines.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"

namespace shardwright {
namespace {

// The baseline's choices in the searched dialect, with the options of that dialect as given.
// Example: torchtitan's plan for a native search keeps its mesh, units and checkpointing, and gets
// native's prefetch of `base`.
Plan Translate(const Plan& baseline, const Plan& base) {
  Plan plan = base;
  plan.shard_size = baseline.shard_size;
  plan.replicate_size = baseline.replicate_size;
  plan.micro_batch = baseline.micro_batch;
  plan.accumulation = baseline.accumulation;
  plan.sync = baseline.sync;
  plan.units = baseline.units;
  plan.recompute = baseline.recompute;
  plan.offload = baseline.offload;
  return plan;
}

bool Agrees(const Plan& plan, const SearchOptions& options) {
  const Plan& base = options.base;
  return (!options.fixed.mesh || plan.shard_size == base.shard_size) &&
         (!options.fixed.micro_batch || plan.micro_batch == base.micro_batch) &&
         (!options.fixed.sync || plan.sync == base.sync) &&
         (!options.fixed.recompute || plan.recompute == base.recompute) &&
         (!options.fixed.offload || plan.offload == base.offload);
}

std::string NameOfSeed(Baseline baseline, const UserChoice& choice) {
  return std::string(NameOf(baseline)) + ", recompute " + std::string(RecomputeName(choice));
}

// The plan of an earlier search, so that a small change of a profile does not change the plan.
void AddPrevious(const SearchOptions& options, const Branches& branches,
                 std::vector<Candidate>& candidates) {
  const Plan* const plan = options.previous;
  const Branch* const branch = plan == nullptr ? nullptr : branches.Of(*plan);
  if (branch != nullptr && plan->dialect == options.base.dialect) {
    Candidate c = branches.CandidateOf(*branch);
    c.label = "as before: " + LabelOf(branch->outer);
    c.plan = *plan;
    c.is_previous = true;
    candidates.push_back(std::move(c));
  }
}

// Example: the fastest plan so far offloads optimizer and activations. Two candidates are added,
// each with one of them on the device. Offloading costs time, so a plan that fits without it is
// often faster.
void AddSimpler(const SearchOptions& options, const Branches& branches,
                std::vector<Candidate>& candidates) {
  const Branch* fastest = nullptr;
  for (const Branch& branch : branches) {
    if (branch.best() != nullptr &&
        (fastest == nullptr ||
         branch.best()->outcome.step_time < fastest->best()->outcome.step_time)) {
      fastest = &branch;
    }
  }
  if (fastest == nullptr || options.objective == Objective::kMemory) {
    return;
  }
  const LocalSearch& local = *fastest->local;
  const InnerChoice& inner = fastest->best()->inner;
  for (bool Offload::*part :
       {&Offload::parameters, &Offload::optimizer, &Offload::activations, &Offload::moments}) {
    Plan plan = local.PlanOf(inner);
    plan.offload.*part = false;
    const Branch* const branch = branches.Of(plan);
    if (branch != nullptr && branch != fastest &&
        branch->status != CandidateStatus::kPrunedMemory) {
      Candidate c = branches.CandidateOf(*branch);
      c.label = local.LabelOf(inner);
      c.plan = std::move(plan);
      candidates.push_back(std::move(c));
    }
  }
}

}  // namespace

std::vector<SeedPlan> SeedPlans(const Problem& input, const SearchOptions& options) {
  const FixedChoices& fixed = options.fixed;
  const bool takes_any = FactsOf(options.base).takes_any_plan;
  if (fixed.units || options.reshard.is_set || (takes_any && (fixed.recompute || fixed.offload))) {
    return {};
  }
  const std::int64_t ranks = DataRanks(input.cluster, MeshOf(options.base));
  std::vector<SeedPlan> seeds;
  for (const Baseline baseline : kBaselines) {
    for (const UserChoice& choice :
         UserChoices(baseline, input.job.mode, input.job.global_batch / ranks)) {
      Plan plan;
      try {
        plan = BaselinePlan(baseline, input.model, ranks, choice);
      } catch (const InputError&) {  // a model without blocks
        continue;
      }
      if (!takes_any && plan.dialect != options.base.dialect) {
        continue;
      }
      plan = Translate(plan, options.base);
      const bool is_known = IsIn(seeds, plan, &SeedPlan::plan);
      if (is_known || !Agrees(plan, options)) {
        continue;
      }
      seeds.push_back({NameOfSeed(baseline, choice), plan});
      if (takes_any) {  // ZeRO-3 keeps what is used again soon
        for (UnitPlan& unit : plan.units) {
          unit.reshard = {Reshard::Kind::kNever, 0};
        }
        seeds.push_back({NameOfSeed(baseline, choice) + ", kept", std::move(plan)});
      }
    }
  }
  return seeds;
}

std::vector<Candidate> SeedCandidates(const Problem& input, const SearchOptions& options,
                                      const Branches& branches, double incumbent) {
  std::vector<Candidate> candidates;
  for (SeedPlan& seed : SeedPlans(input, options)) {
    const Branch* const branch = branches.Of(seed.plan);
    if (branch != nullptr && branch->status != CandidateStatus::kPrunedMemory &&
        branches.BoundOf(*branch) <= incumbent) {
      Candidate c = branches.CandidateOf(*branch);
      c.label = "as " + seed.name + ": " + LabelOf(branch->outer);
      c.baseline = std::move(seed.name);
      c.plan = std::move(seed.plan);
      candidates.push_back(std::move(c));
    }
  }
  AddPrevious(options, branches, candidates);
  AddSimpler(options, branches, candidates);
  return candidates;
}

}  // namespace shardwright
