// The plans of one outer choice: first a seed that fits, then improvements one at a time.
//
// Example of Fit, on the ladder of mix_ladder.cc, limit 20 GiB. Step 0 takes 24.5 GiB, so 4.5 GiB
// are missing. StepSaving(4.5 GiB) is step 5, which takes 18.7 GiB and fits, with 1.3 GiB to spare.
// Step 4 saves 4 GiB and would take 20.5 GiB, more than the limit, so the spare bytes lead to no
// lower step, and step 5 is the answer. Fit stops after at most 8 simulations: predicted and
// simulated memory differ by passing buffers only.
//
// Every simulated plan is kept in `evaluated_`, so that equal choices are simulated once, and so
// that the search can choose among all of them at the end.

#include "planner/local.h"

#include <tuple>
#include <utility>

#include "core/ranges.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// Improvements below this fraction are not worth another round.
constexpr double kLeastGain = 1e-4;
constexpr std::int64_t kSeedEffort = 10;
constexpr std::int64_t kLeastMemoryEffort = 4;

}  // namespace

LocalSearch::LocalSearch(const Problem& input, const SearchOptions& options, const Space& space,
                         const Measured& measured, const OuterChoice& outer, const Limits& limits)
    : in_(input),
      options_(options),
      space_(space),
      facts_(FactsOf(options.base)),
      outer_(outer),
      limits_(limits),
      aim_(limits),
      ladder_(space, measured, outer.offload.activations) {
  if (outer.offload.activations) {
    const HostCopyRates rates = FindHostCopyRates(input.cluster);
    const CopyProfile& copy = input.profile.copy;
    const double forward = measured.forward.Total();
    first_mix_ = ladder_.BestStep({forward, measured.base.Total() - forward,
                                   1 / (rates.to_host_together.value * copy.to_host.value),
                                   1 / (rates.to_device_together.value * copy.to_device.value)});
  }
}

void LocalSearch::AimAt(const Limits& aim) {
  aim_ = aim;
  best_ = kNoIndex;
  for (Evaluated& e : evaluated_) {
    std::tie(e.status, e.deficit) = HoldAgainst(aim_, e.outcome);
  }
}

std::string LocalSearch::NameOfReshard(const Reshard& reshard) {
  return reshard.kind == Reshard::Kind::kToGroup ? "to groups of " + std::to_string(reshard.group)
                                                 : std::string(NameIn(kReshardNames, reshard.kind));
}

Plan LocalSearch::PlanOf(const InnerChoice& inner) const {
  Plan plan = OuterPlan(outer_, options_);
  plan.units = inner.units;
  plan.in_flight = inner.in_flight;
  plan.transfers = inner.transfers;
  plan.backward_prefetch = inner.backward_prefetch;
  plan.forward_prefetch = inner.forward_prefetch;
  if (ladder_.steps() > 0) {
    plan.recompute = ladder_.Regions(space_, inner.mix);
  }
  if (!options_.fixed.units) {
    KeepFullPrecision(in_.model, in_.job.precision, plan);
    if (facts_.keeps_root) {
      plan.units.back().reshard.kind = Reshard::Kind::kNever;
    }
  }
  return plan;
}

std::string LocalSearch::LabelOf(const InnerChoice& inner) const {
  std::string label = ::shardwright::LabelOf(outer_) + ", units " + inner.units_label;
  if (!inner.reshard_label.empty()) {
    label += ", reshard " + inner.reshard_label;
  }
  if (facts_.early_gathers == EarlyGathers::kInFlight) {
    label += ", in flight " + std::to_string(inner.in_flight);
    label += inner.transfers == Transfers::kInTurn ? ", transfers in turn" : "";
  }
  if (!inner.prefetch_label.empty()) {
    label += ", prefetch " + inner.prefetch_label;
  }
  const std::string mix = ladder_.Label(space_, inner.mix);
  return mix.empty() ? label : label + ", recompute " + mix;
}

const Evaluated* LocalSearch::best() const {
  return best_ == kNoIndex ? nullptr : &evaluated_[best_];
}

bool LocalSearch::IsStopped() const {
  return effort_ <= 0 || (options_.stop != nullptr && options_.stop->load());
}

// One simulation, or none if the choice is known. A plan that its dialect cannot express is kept as
// not allowed.
const Evaluated& LocalSearch::Evaluate(Evaluator& evaluator, const InnerChoice& inner) {
  const auto known = FindIn(evaluated_, inner, &Evaluated::inner);
  if (known != evaluated_.end()) {
    return *known;
  }
  --effort_;
  const Plan plan = PlanOf(inner);
  Evaluated e = {inner, {}, CandidateStatus::kFits, Bytes(0)};
  e.outcome.is_allowed = CanRecompute(plan) || (options_.fixed.units && options_.fixed.recompute);
  if (e.outcome.is_allowed) {
    e.outcome = evaluator.Try(plan, limits_.device);
  }
  std::tie(e.status, e.deficit) = HoldAgainst(aim_, e.outcome);
  evaluated_.push_back(std::move(e));
  return evaluated_.back();
}

// `most_that_fails` and `least_that_fits` close in on the step. Once a plan that fits is known, a
// choice that misses by more than the ladder can save is given up at once.
std::size_t LocalSearch::Fit(Evaluator& evaluator, InnerChoice inner) {
  std::size_t least_that_fits = kNoIndex;  // step
  std::size_t found = kNoIndex;            // index into evaluated_
  std::size_t most_that_fails = kNoIndex;
  constexpr int kMostTries = 8;
  for (int attempt = 0; attempt < kMostTries && (attempt == 0 || !IsStopped()); ++attempt) {
    const Evaluated& e = Evaluate(evaluator, inner);
    const auto index = static_cast<std::size_t>(&e - evaluated_.data());
    if (!e.outcome.is_allowed) {
      return found;
    }
    std::size_t next = 0;
    if (e.status == CandidateStatus::kFits) {
      if (options_.objective == Objective::kMemory || outer_.offload.activations) {
        return index;  // what is fastest is not told by memory
      }
      if (least_that_fits == kNoIndex || inner.mix < least_that_fits) {
        least_that_fits = inner.mix;
        found = index;
      }
      next = ladder_.StepSaving(ladder_.Saved(inner.mix) -
                                static_cast<double>((aim_.device - e.outcome.Memory()).value));
    } else {
      most_that_fails =
          most_that_fails == kNoIndex ? inner.mix : std::max(most_that_fails, inner.mix);
      const auto missing = static_cast<double>(e.deficit.value);
      if (best_ != kNoIndex && found == kNoIndex && e.status == CandidateStatus::kOverDevice &&
          missing > ladder_.MostSavedFrom(inner.mix)) {
        // Counts as the attempt that it spares, so that others are as many as with it.
        effort_ -= inner.mix < ladder_.steps() ? 1 : 0;
        return kNoIndex;
      }
      const auto ranks = static_cast<double>(in_.cluster.gpus_per_node);
      next = e.status == CandidateStatus::kOverHost
                 ? ladder_.StepCopyingLess(inner.mix, missing / ranks)
                 : ladder_.StepSaving(ladder_.Saved(inner.mix) + missing);
    }
    const std::size_t low = most_that_fails == kNoIndex ? 0 : most_that_fails + 1;
    const std::size_t high = least_that_fits == kNoIndex ? ladder_.steps() : least_that_fits;
    if (low > ladder_.steps() || (least_that_fits != kNoIndex && low >= least_that_fits)) {
      break;
    }
    next = std::clamp(next, low, high);
    if (space_.recomputes_all_or_none && next > 0) {
      next = (next + ladder_.blocks() - 1) / ladder_.blocks() * ladder_.blocks();
    }
    if (next == inner.mix || next == least_that_fits) {
      break;
    }
    inner.mix = next;
  }
  return found;
}

bool LocalSearch::Try(Evaluator& evaluator, const InnerChoice& inner) {
  if (IsStopped()) {
    return false;
  }
  const std::size_t index = Fit(evaluator, inner);
  if (index == kNoIndex) {
    return false;
  }
  const bool by_memory = options_.objective == Objective::kMemory;
  const auto cost = [&](std::size_t i) {
    const Outcome& o = evaluated_[i].outcome;
    return by_memory ? static_cast<double>(o.Memory().value) : o.step_time.value;
  };
  if (best_ == kNoIndex || cost(index) < cost(best_) * (1 - kLeastGain)) {
    best_ = index;
    return true;
  }
  return false;
}

// First try: the first family of units, without checkpointing or with as much as fits. If that
// fails: the most units, all freed at once, all blocks recomputed, the fewest gathers in flight.
void LocalSearch::Seed(Evaluator& evaluator) {
  effort_ = kSeedEffort;
  InnerChoice inner;
  inner.units = space_.families.front().units;
  inner.units_label = space_.families.front().name;
  inner.in_flight = space_.in_flight.front();
  inner.transfers = options_.base.transfers;
  inner.backward_prefetch = options_.base.backward_prefetch;
  inner.forward_prefetch = options_.base.forward_prefetch;
  inner.mix = options_.objective == Objective::kMemory ? ladder_.steps() : first_mix_;
  TakeAllowed(evaluator, inner);
  if (Try(evaluator, inner)) {
    return;
  }
  // The least memory that we know how to reach: small units, freed at once, all recomputed.
  inner.mix = ladder_.steps();
  inner.in_flight = *std::min_element(space_.in_flight.begin(), space_.in_flight.end());
  const InnerChoice seeded = inner;
  for (const UnitFamily& family : space_.families) {
    if (family.units.size() > inner.units.size()) {
      inner.units = family.units;
      inner.units_label = family.name;
    }
  }
  if (!space_.reshards.empty()) {
    inner.reshard_label = NameOfReshard(Reshard());
    for (UnitPlan& unit : inner.units) {
      unit.reshard = Reshard();
    }
  }
  effort_ += kLeastMemoryEffort;
  if (!IsStopped() && !Evaluate(evaluator, inner).outcome.is_allowed) {
    inner = seeded;
  }
  (void)Try(evaluator, inner);
}

void LocalSearch::TakeAllowed(Evaluator& evaluator, InnerChoice& inner) {
  for (const std::size_t mix : {inner.mix, std::size_t{0}}) {
    inner.mix = mix;
    for (const UnitFamily& family : space_.families) {
      inner.units = family.units;
      inner.units_label = family.name;
      if (IsStopped() || Evaluate(evaluator, inner).outcome.is_allowed) {
        return;
      }
    }
  }
}

}  // namespace shardwright
