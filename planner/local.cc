#include "planner/local.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <tuple>
#include <utility>

#include "schedule/wrap.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

constexpr std::size_t kNoIndex = static_cast<std::size_t>(-1);
// Improvements below this fraction are not worth another round.
constexpr double kLeastGain = 1e-4;
constexpr std::int64_t kSeedEffort = 10;
constexpr std::int64_t kLeastMemoryEffort = 4;

bool IsRoot(const UnitPlan& unit) {
  return unit.modules.size() == 1 && unit.modules[0].empty();
}

std::string NameOfReshard(const Reshard& reshard) {
  switch (reshard.kind) {
    case Reshard::Kind::kAlways:
      return "always";
    case Reshard::Kind::kNever:
      return "never";
    case Reshard::Kind::kToGroup:
      return "to groups of " + std::to_string(reshard.group);
  }
  return "";
}

// Each unit but the root gathers the next ones early; 0: as the dialect does without lists.
void SetPrefetch(std::size_t forward, std::size_t backward, std::vector<UnitPlan>& units) {
  const std::size_t count = units.empty() ? 0 : units.size() - 1;
  for (std::size_t u = 0; u < count; ++u) {
    units[u].forward_prefetch.clear();
    units[u].backward_prefetch.clear();
    for (std::size_t next = u + 1; next <= u + forward && next < count; ++next) {
      units[u].forward_prefetch.push_back(units[next].name);
    }
    for (std::size_t back = 1; back <= backward && back <= u; ++back) {
      units[u].backward_prefetch.push_back(units[u - back].name);
    }
  }
}

}  // namespace

LocalSearch::LocalSearch(const SearchInput& input, const SearchOptions& options, const Space& space,
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

const Evaluated& LocalSearch::Evaluate(Evaluator& evaluator, const InnerChoice& inner) {
  const auto known = std::find_if(evaluated_.begin(), evaluated_.end(),
                                  [&](const Evaluated& e) { return e.inner == inner; });
  if (known != evaluated_.end()) {
    return *known;
  }
  --effort_;
  const Plan plan = PlanOf(inner);
  Evaluated e = {inner, {}, CandidateStatus::kFits, Bytes(0)};
  e.outcome.is_allowed = CanRecompute(plan) || (options_.fixed.units && options_.fixed.recompute);
  if (e.outcome.is_allowed) {
    e.outcome = evaluator.RunIfFits(plan, limits_);
  }
  std::tie(e.status, e.deficit) = HoldAgainst(aim_, e.outcome);
  evaluated_.push_back(std::move(e));
  return evaluated_.back();
}

std::size_t LocalSearch::Fit(Evaluator& evaluator, InnerChoice inner) {
  std::size_t least_that_fits = kNoIndex;  // step
  std::size_t found = kNoIndex;            // index into evaluated_
  std::size_t most_that_fails = kNoIndex;
  constexpr int kMostTries = 8;
  for (int attempt = 0; attempt < kMostTries && (attempt == 0 || !IsStopped()); ++attempt) {
    const Evaluated& e = Evaluate(evaluator, inner);
    const auto index = static_cast<std::size_t>(&e - evaluated_.data());
    if (!e.outcome.is_allowed) {
      return kNoIndex;
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
                                static_cast<double>((aim_.device - e.outcome.memory).value));
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
    return by_memory ? static_cast<double>(o.memory.value) : o.time.value;
  };
  if (best_ == kNoIndex || cost(index) < cost(best_) * (1 - kLeastGain)) {
    best_ = index;
    return true;
  }
  return false;
}

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
  if (Try(evaluator, inner)) {
    return;
  }
  // The least memory that we know how to reach: small units, freed at once, all recomputed.
  inner.mix = ladder_.steps();
  inner.in_flight = *std::min_element(space_.in_flight.begin(), space_.in_flight.end());
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
  (void)Try(evaluator, inner);
}

void LocalSearch::TryFamilies(Evaluator& evaluator) {
  for (const UnitFamily& family : space_.families) {
    InnerChoice inner = evaluated_[best_].inner;
    const std::vector<UnitPlan> before = std::exchange(inner.units, family.units);
    inner.units_label = family.name;
    // Freed as the units at the same place were, once that was looked at.
    for (std::size_t u = 0; u < inner.units.size() && !inner.reshard_label.empty(); ++u) {
      inner.units[u].reshard = before[u * before.size() / inner.units.size()].reshard;
    }
    if (facts_.early_gathers == EarlyGathers::kLists) {
      inner.prefetch_label.clear();  // the lists are the units'
    }
    (void)Try(evaluator, inner);
  }
}

void LocalSearch::TryReshards(Evaluator& evaluator) {
  for (Reshard reshard : space_.reshards) {
    const bool to_group = reshard.kind == Reshard::Kind::kToGroup;
    if (to_group && outer_.shard_size <= reshard.group) {
      reshard.group = outer_.shard_size / 2;  // half a node
    }
    if (to_group && (reshard.group < 2 || outer_.shard_size % reshard.group != 0)) {
      continue;
    }
    InnerChoice inner = evaluated_[best_].inner;
    inner.reshard_label = NameOfReshard(reshard);
    for (UnitPlan& unit : inner.units) {
      if (!to_group || unit.reshard.kind != Reshard::Kind::kNever) {
        unit.reshard = reshard;
      }
    }
    (void)Try(evaluator, inner);
  }
  if (space_.reshards.empty()) {
    return;
  }
  const std::size_t count = evaluated_[best_].inner.units.size();
  for (std::size_t parts = 2; parts <= 16 && parts <= count; parts *= 2) {
    (void)Try(evaluator, Keeping(count / parts));
  }
  TryKeeping(evaluator);
}

// The best choice with at least the last `count` units kept, whose backward comes first.
InnerChoice LocalSearch::Keeping(std::size_t count) const {
  InnerChoice inner = evaluated_[best_].inner;
  for (std::size_t u = 0; u < inner.units.size(); ++u) {
    if (u + count >= inner.units.size()) {
      inner.units[u].reshard = {Reshard::Kind::kNever, 0};
    }
  }
  inner.reshard_label = "never in the last " + std::to_string(count) + " units";
  return inner;
}

// Keeps as many of the last units as fit into the memory that the best plan leaves.
void LocalSearch::TryKeeping(Evaluator& evaluator) {
  const std::vector<UnitPlan> units = evaluated_[best_].inner.units;
  const auto freed = std::find_if(units.rbegin(), units.rend(), [](const UnitPlan& unit) {
    return unit.reshard.kind != Reshard::Kind::kNever;
  });
  const double unit_bytes = static_cast<double>(CountParameters(in_.model)) *
                            static_cast<double>(SizeOf(in_.job.precision.param)) /
                            static_cast<double>(units.size());
  auto most = static_cast<std::int64_t>(units.size());
  auto least = static_cast<std::int64_t>(freed - units.rbegin());  // that fit
  std::int64_t at = least;
  Bytes room = aim_.device - evaluated_[best_].outcome.memory;
  constexpr int kMostTries = 5;
  for (int attempt = 0; attempt < kMostTries && least < most && !IsStopped(); ++attempt) {
    at += static_cast<std::int64_t>(std::floor(static_cast<double>(room.value) / unit_bytes));
    at = std::clamp(at, least, most);
    const Evaluated& e = Evaluate(evaluator, Keeping(static_cast<std::size_t>(at)));
    const auto index = static_cast<std::size_t>(&e - evaluated_.data());
    if (at == least || !e.outcome.is_allowed) {
      return;
    }
    room = aim_.device - e.outcome.memory;
    if (e.status == CandidateStatus::kFits) {
      best_ = e.outcome.time < evaluated_[best_].outcome.time ? index : best_;
      least = at;
    } else {
      most = at - 1;
    }
  }
}

void LocalSearch::TryInFlight(Evaluator& evaluator) {
  for (const std::int64_t in_flight : space_.in_flight) {
    InnerChoice inner = evaluated_[best_].inner;
    inner.in_flight = in_flight;
    (void)Try(evaluator, inner);
  }
}

void LocalSearch::TryTransfers(Evaluator& evaluator) {
  if (facts_.early_gathers != EarlyGathers::kInFlight || options_.fixed.transfers) {
    return;
  }
  InnerChoice inner = evaluated_[best_].inner;
  const bool in_turn = inner.transfers == Transfers::kInTurn;
  inner.transfers = in_turn ? Transfers::kAtOnce : Transfers::kInTurn;
  (void)Try(evaluator, inner);
}

// Each of `choices` with every in-flight limit, and with transfers at once and in turn.
std::vector<InnerChoice> LocalSearch::OtherOrders(const std::vector<InnerChoice>& choices) const {
  const bool has_turns =
      facts_.early_gathers == EarlyGathers::kInFlight && !options_.fixed.transfers;
  std::vector<InnerChoice> result;
  for (InnerChoice inner : choices) {
    for (const std::int64_t in_flight : space_.in_flight) {
      inner.in_flight = in_flight;
      result.push_back(inner);
      if (has_turns) {
        result.push_back(inner);
        result.back().transfers =
            inner.transfers == Transfers::kInTurn ? Transfers::kAtOnce : Transfers::kInTurn;
      }
    }
  }
  return result;
}

// Switches, or lists of the next units.
void LocalSearch::TryPrefetch(Evaluator& evaluator) {
  if (facts_.early_gathers == EarlyGathers::kSwitches && !options_.fixed.prefetch) {
    for (const bool forward : {false, true}) {
      for (const BackwardPrefetch backward : {BackwardPrefetch::kPre, BackwardPrefetch::kPost}) {
        InnerChoice inner = evaluated_[best_].inner;
        inner.forward_prefetch = forward;
        inner.backward_prefetch = backward;
        inner.prefetch_label = std::string(forward ? "in forward, " : "") +
                               (backward == BackwardPrefetch::kPre ? "pre" : "post");
        (void)Try(evaluator, inner);
      }
    }
  }
  if (facts_.early_gathers != EarlyGathers::kLists || options_.fixed.units) {
    return;
  }
  const std::pair<std::size_t, std::size_t> kDepths[] = {{1, 0}, {2, 0}, {0, 2}, {1, 2}, {2, 2}};
  for (const auto& [forward, backward] : kDepths) {
    InnerChoice inner = evaluated_[best_].inner;
    SetPrefetch(forward, backward, inner.units);
    inner.prefetch_label = std::to_string(forward) + " ahead in forward, " +
                           std::to_string(std::max<std::size_t>(backward, 1)) + " in backward";
    (void)Try(evaluator, inner);
  }
}

void LocalSearch::TryMix(Evaluator& evaluator, std::size_t mix) {
  InnerChoice inner = evaluated_[best_].inner;
  if (IsStopped() || mix == inner.mix || mix > ladder_.steps()) {
    return;
  }
  inner.mix = mix;
  const Evaluated& e = Evaluate(evaluator, inner);
  const auto index = static_cast<std::size_t>(&e - evaluated_.data());
  if (e.outcome.is_allowed && e.status == CandidateStatus::kFits &&
      e.outcome.time < evaluated_[best_].outcome.time) {
    best_ = index;
  }
}

// With activations on the host, the copies decide how much is worth keeping.
void LocalSearch::TryMixes(Evaluator& evaluator) {
  if (!outer_.offload.activations || ladder_.steps() == 0) {
    return;
  }
  for (std::size_t width = std::max<std::size_t>(1, ladder_.blocks() / 2); width > 0; width /= 3) {
    const std::size_t mix = evaluated_[best_].inner.mix;
    TryMix(evaluator, mix + width);
    TryMix(evaluator, mix >= width ? mix - width : 0);
  }
}

// Units of `items`, in order: bit i of `cuts` ends one behind item i; what follows the last cut
// belongs to the root.
void LocalSearch::TryPartition(Evaluator& evaluator, const std::vector<UnitPlan>& items,
                               std::uint64_t cuts) {
  InnerChoice inner = evaluated_[best_].inner;
  const UnitPlan root = inner.units.back();
  inner.units.clear();
  bool is_open = false;
  for (std::size_t i = 0; i < items.size() && cuts >> i != 0; ++i) {
    if (is_open) {
      inner.units.back().modules.push_back(items[i].modules.front());
    } else {
      inner.units.push_back(items[i]);
    }
    is_open = ((cuts >> i) & 1U) == 0;
  }
  inner.units.push_back(root);
  if (facts_.early_gathers == EarlyGathers::kLists) {
    inner.prefetch_label.clear();  // the lists are the units'
  }
  inner.units_label = std::to_string(inner.units.size()) + " units";
  (void)Try(evaluator, inner);
}

// The finest units without nesting, one module each, as the best plan frees them.
std::vector<UnitPlan> LocalSearch::Items() const {
  const std::vector<UnitPlan>& best = evaluated_[best_].inner.units;
  std::map<std::string, Reshard> reshard_of;
  for (const UnitPlan& unit : best) {
    for (const std::string& module : unit.modules) {
      reshard_of[module] = unit.reshard;
    }
  }
  const UnitFamily* finest = &space_.families.front();
  for (const UnitFamily& family : space_.families) {
    if (family.units.size() > finest->units.size() && !family.is_nested) {
      finest = &family;
    }
  }
  std::vector<UnitPlan> items;
  for (const UnitPlan& unit : finest->units) {
    for (const std::string& module : unit.modules) {
      if (!module.empty()) {
        const auto known = reshard_of.find(module);
        items.push_back(unit);
        items.back().name = unit.modules.size() > 1 ? module : unit.name;
        items.back().modules = {module};
        items.back().reshard = known == reshard_of.end() ? best.back().reshard : known->second;
      }
    }
  }
  return items;
}

// Small models: any units of neighbouring modules. All of them where that is possible, else those
// that differ from the best in one cut, or in the place of one.
void LocalSearch::TryPartitions(Evaluator& evaluator) {
  constexpr std::size_t kMostItems = 14;
  if (options_.fixed.units || !facts_.groups_modules ||
      !IsRoot(evaluated_[best_].inner.units.back())) {
    return;
  }
  const std::vector<UnitPlan> items = Items();
  if (items.empty() || items.size() > kMostItems) {
    return;
  }
  const std::uint64_t all = std::uint64_t{1} << items.size();
  if (static_cast<std::int64_t>(all) <= effort_ / 2) {
    for (std::uint64_t cuts = 0; cuts < all; ++cuts) {
      TryPartition(evaluator, items, cuts);
    }
    return;
  }
  std::uint64_t cuts = 0;  // of the best
  for (std::size_t i = 0; i < items.size(); ++i) {
    for (const UnitPlan& unit : evaluated_[best_].inner.units) {
      cuts |= unit.modules.back() == items[i].modules.front() ? std::uint64_t{1} << i : 0;
    }
  }
  std::size_t before = kNoIndex;
  while (before != best_ && !IsStopped()) {
    before = best_;
    for (std::size_t i = 0; i < 2 * items.size() - 1; ++i) {
      // One bit, or two neighbours: where they differ that moves a cut.
      const std::uint64_t change =
          i < items.size() ? std::uint64_t{1} << i : std::uint64_t{3} << (i - items.size());
      const std::size_t last = best_;
      TryPartition(evaluator, items, cuts ^ change);
      cuts = best_ == last ? cuts : cuts ^ change;
    }
  }
}

void LocalSearch::TrySymmetric(Evaluator& evaluator) {
  if (best_ == kNoIndex || ladder_.steps() == 0) {
    return;
  }
  InnerChoice inner = evaluated_[best_].inner;
  const std::size_t level = (inner.mix + ladder_.blocks() - 1) / ladder_.blocks();
  inner.mix = level * ladder_.blocks();
  (void)Evaluate(evaluator, inner);
}

void LocalSearch::TryUniform(Evaluator& evaluator, bool thoroughly) {
  if (best_ == kNoIndex || options_.fixed.units) {
    return;
  }
  const InnerChoice best = evaluated_[best_].inner;
  std::vector<InnerChoice> starts = {best};
  if (ladder_.steps() > 0) {
    const std::size_t level = best.mix / ladder_.blocks();
    starts[0].mix = (best.mix + ladder_.blocks() - 1) / ladder_.blocks() * ladder_.blocks();
    if (thoroughly && starts[0].mix > best.mix) {
      starts.push_back(best);
      starts[1].mix = level * ladder_.blocks();
    }
  }
  for (const InnerChoice& start : thoroughly ? OtherOrders(starts) : starts) {
    for (const UnitFamily& family : space_.families) {
      for (const Reshard& reshard : space_.reshards) {
        if (family.is_nested || reshard.kind == Reshard::Kind::kToGroup) {
          continue;
        }
        InnerChoice inner = start;
        inner.prefetch_label.clear();
        inner.units = family.units;
        inner.units_label = family.name;
        inner.reshard_label = NameOfReshard(reshard);
        for (UnitPlan& unit : inner.units) {
          unit.reshard = reshard;
        }
        (void)Evaluate(evaluator, inner);
      }
    }
  }
}

void LocalSearch::Refine(Evaluator& evaluator, std::int64_t effort) {
  if (best_ == kNoIndex) {
    return;
  }
  effort_ = effort;
  constexpr int kMostRounds = 3;
  for (int round = 0; round < kMostRounds && !IsStopped(); ++round) {
    const std::size_t before = best_;
    TryTransfers(evaluator);
    if (!options_.fixed.units) {
      TryFamilies(evaluator);
    }
    TryReshards(evaluator);
    TryInFlight(evaluator);
    TryPrefetch(evaluator);
    TryMixes(evaluator);
    TryPartitions(evaluator);
    if (best_ == before) {
      break;
    }
  }
}

}  // namespace shardwright
