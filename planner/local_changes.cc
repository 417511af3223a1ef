// The changes that a local search tries, one at a time.
//
// Example: the seed takes 1.20 s. Units of 2 blocks take 1.15 s and are kept; `reshard: never`
// takes 1.12 s and is kept, as it fits; 3 units in flight take 1.13 s and are dropped. A round in
// which no change helps ends the search of this branch, and so does the third round. Each change is
// fitted again: if it needs more memory, more blocks are recomputed, and the time counts with that.

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "planner/local.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

bool IsRoot(const UnitPlan& unit) {
  return unit.modules.size() == 1 && unit.modules[0].empty();
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

// All units alike first, then the last half, quarter, eighth and sixteenth of them kept: these come
// first in backward, so they are kept for the shortest time.
void LocalSearch::TryReshards(Evaluator& evaluator) {
  for (Reshard reshard : space_.reshards) {
    const bool to_group = reshard.kind == Reshard::Kind::kToGroup;
    if (to_group && outer_.shard_size <= reshard.group) {
      reshard.group = outer_.shard_size / 2;  // half a node
    }
    if (to_group && (reshard.group < 2 || !MeshOf(outer_).SplitsInto(reshard.group))) {
      continue;
    }
    InnerChoice inner = evaluated_[best_].inner;
    inner.reshard_label = NameOfReshard(reshard);
    bool frees = !to_group;  // does some unit, which may then be gathered from a group again?
    for (UnitPlan& unit : inner.units) {
      if (!to_group || unit.reshard.kind != Reshard::Kind::kNever) {
        unit.reshard = reshard;
        frees = true;
      }
    }
    if (frees) {
      (void)Try(evaluator, inner);
    }
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
// Example: 6 GiB are free and a unit has 1 GiB gathered. The last 6 units more are kept; if that
// takes too much, fewer.
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
  Bytes room = aim_.device - evaluated_[best_].outcome.Memory();
  constexpr int kMostTries = 5;
  for (int attempt = 0; attempt < kMostTries && least < most && !IsStopped(); ++attempt) {
    at += static_cast<std::int64_t>(std::floor(static_cast<double>(room.value) / unit_bytes));
    at = std::clamp(at, least, most);
    const Evaluated& e = Evaluate(evaluator, Keeping(static_cast<std::size_t>(at)));
    const auto index = static_cast<std::size_t>(&e - evaluated_.data());
    if (at == least || !e.outcome.is_allowed) {
      return;
    }
    room = aim_.device - e.outcome.Memory();
    if (e.status == CandidateStatus::kFits) {
      best_ = e.outcome.step_time < evaluated_[best_].outcome.step_time ? index : best_;
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
      e.outcome.step_time < evaluated_[best_].outcome.step_time) {
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
// Example: 5 items have 2^5 = 32 ways to cut; with an effort of 64 or more all are tried. With 12
// items there are 4,096, so single cuts are set, removed and moved until none helps.
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

// Example: 4 blocks, best mix 5 ("full" in 1, "mlp" in 3). Step 8 ("full" in all) is evaluated too:
// a tie goes to plans that treat all blocks alike.
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
