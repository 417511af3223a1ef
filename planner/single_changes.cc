// Each other value of each choice of a plan, one at a time, everything else as it is.
//
// Example: a job on 8 GPUs with shard 8, micro-batch 1 x 4 that reduces after each micro-batch. The
// plans tried are shard 4, 2 and 1; micro-batches 2 x 2 and 4 x 1; reductions after the last
// micro-batch; parameters kept after forward; and so on. Of each choice the fastest plan that fits
// and gains more than 0.01 % is reported.
//
// Changes that can only cost time are left out: more offloading, or checkpointing where there is
// none.

#include "planner/single_changes.h"

#include <array>
#include <optional>
#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "planner/evaluator.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

std::string SyncText(SyncMode sync) {
  return sync == SyncMode::kEvery  ? "after each micro-batch"
         : sync == SyncMode::kLast ? "after the last micro-batch"
                                   : "between replicas after the last micro-batch";
}

std::string ReshardText(const Reshard& reshard) {
  return reshard.kind == Reshard::Kind::kAlways  ? "freed after forward"
         : reshard.kind == Reshard::Kind::kNever ? "kept until backward"
                                                 : "in groups of " + std::to_string(reshard.group);
}

std::string OffloadText(const Offload& offload) {
  std::string text;
  const std::pair<bool, const char*> parts[] = {{offload.parameters, "parameters"},
                                                {offload.optimizer, "optimizer"},
                                                {offload.activations, "activations"},
                                                {offload.moments, "moments"}};
  for (const auto& [is_on, name] : parts) {
    if (is_on) {
      text += (text.empty() ? "" : ", ") + std::string(name);
    }
  }
  return text.empty() ? "nothing" : text;
}

std::string RecomputeText(const Plan& plan) {
  if (plan.recompute.empty()) {
    return "nothing";
  }
  const bool all_full = AllOf(
      plan.recompute, [](const RecomputeRegion& r) { return r.kind == RecomputeKind::kFull; });
  return std::to_string(plan.recompute.size()) +
         (all_full ? " regions in full" : " regions, some selectively");
}

std::string UnitsText(const Plan& plan) {
  return plan.units.size() == 1 ? "one unit" : std::to_string(plan.units.size()) + " units";
}

std::string BatchText(const Plan& plan) {
  return std::to_string(plan.micro_batch) + " samples x " + std::to_string(plan.accumulation);
}

std::string MeshText(const Plan& plan) {
  return "shard " + std::to_string(plan.shard_size) + " x replicate " +
         std::to_string(plan.replicate_size);
}

bool IsRoot(const UnitPlan& unit) {
  return IsIn(unit.modules, "");
}

// Lists of the units that come next (in backward: came before), `depth` of them.
// Example: units A, B, C, D, forward 1 and backward 2. C gathers D early in forward, and B and A
// early in backward.
void PrefetchNext(std::size_t forward, std::size_t backward, Plan& plan) {
  std::vector<UnitPlan*> order;
  for (UnitPlan& unit : plan.units) {
    if (!IsRoot(unit) && !unit.full_precision) {
      order.push_back(&unit);
    }
  }
  for (std::size_t i = 0; i < order.size(); ++i) {
    order[i]->forward_prefetch.clear();
    order[i]->backward_prefetch.clear();
    for (std::size_t d = 1; d <= forward && i + d < order.size(); ++d) {
      order[i]->forward_prefetch.push_back(order[i + d]->name);
    }
    for (std::size_t d = 1; d <= backward && d <= i; ++d) {
      order[i]->backward_prefetch.push_back(order[i - d]->name);
    }
  }
}

std::string PrefetchText(const Plan& plan) {
  switch (FactsOf(plan).early_gathers) {
    case EarlyGathers::kInFlight:
      return std::to_string(plan.in_flight) + " units in flight";
    case EarlyGathers::kSwitches: {
      const std::string backward = plan.backward_prefetch == BackwardPrefetch::kNone   ? "none"
                                   : plan.backward_prefetch == BackwardPrefetch::kPost ? "late"
                                                                                       : "early";
      return "backward " + backward + ", forward " + (plan.forward_prefetch ? "on" : "off");
    }
    case EarlyGathers::kNone:
    case EarlyGathers::kLists:
      break;
  }
  std::size_t forward = 0, backward = 0;
  for (const UnitPlan& unit : plan.units) {
    forward = std::max(forward, unit.forward_prefetch.size());
    backward = std::max(backward, unit.backward_prefetch.size());
  }
  return forward + backward == 0 ? "as the framework does by itself"
                                 : "lists of " + std::to_string(forward) + " in forward, " +
                                       std::to_string(backward) + " in backward";
}

// Simulates every plan that differs from the given one in one choice: some dozens.
class Finder {
 public:
  Finder(const Problem& input, const SearchOptions& options)
      : in_(input),
        options_(options),
        now_(options.base),
        evaluator_(input),
        limits_{MemoryLimit(input, options), input.cluster.node.pinned_limit} {}

  SingleChanges Run() {
    const Outcome outcome = evaluator_.Try(now_);
    if (!outcome.is_allowed) {
      throw InputError("plan", "choices that its dialect does not have", "a plan that can run");
    }
    result_.step_time = outcome.step_time;
    result_.memory = outcome.Memory();
    const Space space = MakeSpace(in_, options_);
    Outer(space);
    Reshards(space);
    Prefetch();
    Recompute(space);
    Units(space);
    Dialects();
    for (std::optional<SingleChange>& change : best_) {
      if (change) {
        result_.best.push_back(std::move(*change));
      }
    }
    StableSortBy(result_.best, &SingleChange::step_time);
    return std::move(result_);
  }

 private:
  // Example: the plan takes 10 ms. 9.9995 ms is a gain of 0.005 %, which is no more than rounding;
  // 9.9 ms is kept, and from then on a plan of the same choice has to take less than 9.899 ms.
  void Try(PlanChoice choice, std::string from, std::string to, Plan plan) {
    if (plan == now_) {
      return;
    }
    const Outcome outcome = evaluator_.Try(plan);
    std::optional<SingleChange>& best = best_[static_cast<std::size_t>(choice)];
    // A gain that is no more than rounding is none.
    constexpr double kFaster = 1 - 1e-4;
    const double limit = best ? best->step_time.value : result_.step_time.value;
    if (outcome.is_allowed && HoldAgainst(limits_, outcome).first == CandidateStatus::kFits &&
        outcome.step_time.value < limit * kFaster) {
      best = {choice,          std::move(from),   std::move(to),
              std::move(plan), outcome.step_time, outcome.Memory()};
    }
  }

  // Mesh, batch, sync and offload, of which exactly one differs.
  // Example as above: (shard 4, micro-batch 1) differs in one and is tried; (shard 4, micro-batch
  // 2) is not.
  void Outer(const Space& space) {
    for (const OuterChoice& outer : space.outer) {
      const bool mesh = outer.shard_size != now_.shard_size;
      const bool batch = outer.micro_batch != now_.micro_batch;
      const bool offload = !(outer.offload == now_.offload);
      // With another batch there may be nothing to accumulate, and so one way to reduce.
      const bool sync = outer.sync != now_.sync && outer.accumulation > 1;
      if (mesh + batch + offload + sync != 1 ||
          (offload && CountOf(outer.offload) >= CountOf(now_.offload))) {
        continue;  // to offload more gains memory, never time
      }
      Plan plan = now_;
      SetOuter(outer, plan);
      if (mesh) {
        ClampReshard(plan);
        Try(PlanChoice::kMesh, MeshText(now_), MeshText(plan), std::move(plan));
      } else if (batch) {
        Try(PlanChoice::kBatch, BatchText(now_), BatchText(plan), std::move(plan));
      } else if (offload) {
        Try(PlanChoice::kOffload, OffloadText(now_.offload), OffloadText(plan.offload),
            std::move(plan));
      } else {
        Try(PlanChoice::kSync, SyncText(now_.sync), SyncText(plan.sync), std::move(plan));
      }
    }
  }

  // Groups that the smaller mesh cannot have are freed instead.
  static void ClampReshard(Plan& plan) {
    for (UnitPlan& unit : plan.units) {
      if (unit.reshard.kind == Reshard::Kind::kToGroup &&
          !MeshOf(plan).SplitsInto(unit.reshard.group)) {
        unit.reshard = Reshard{};
      }
    }
  }

  void Reshards(const Space& space) {
    std::vector<Reshard> values = space.reshards;
    values.push_back({Reshard::Kind::kNever, 0});
    values.push_back({Reshard::Kind::kAlways, 0});
    if (now_.shard_size == 1 || options_.fixed.units || options_.reshard.is_set) {
      return;
    }
    auto first = FindIf(now_.units, [](const UnitPlan& unit) { return !IsRoot(unit); });
    first = first == now_.units.end() ? now_.units.begin() : first;
    for (const Reshard& reshard : values) {
      Plan plan = now_;
      for (UnitPlan& unit : plan.units) {
        // The root's backward comes first: to free it is never a gain.
        if (!IsRoot(unit) || reshard.kind == Reshard::Kind::kNever) {
          unit.reshard = reshard;
        }
      }
      ClampReshard(plan);
      Try(PlanChoice::kReshard, ReshardText(first->reshard), ReshardText(reshard), plan);
    }
  }

  // Three, two or four plans, by how the dialect gathers early.
  void Prefetch() {
    if (options_.fixed.prefetch || options_.fixed.in_flight || options_.fixed.units) {
      return;
    }
    const auto add = [&](Plan plan) {
      std::string to = PrefetchText(plan);
      Try(PlanChoice::kPrefetch, PrefetchText(now_), std::move(to), std::move(plan));
    };
    const EarlyGathers early = FactsOf(now_).early_gathers;
    if (early == EarlyGathers::kInFlight) {
      for (const std::int64_t in_flight : {2, 3, 4}) {
        Plan plan = now_;
        plan.in_flight = in_flight;
        add(std::move(plan));
      }
    } else if (early == EarlyGathers::kSwitches) {
      for (const bool forward : {false, true}) {
        Plan plan = now_;
        plan.backward_prefetch = BackwardPrefetch::kPre;
        plan.forward_prefetch = forward;
        add(std::move(plan));
      }
    } else if (early == EarlyGathers::kLists) {
      constexpr std::array<std::pair<std::size_t, std::size_t>, 4> kDepths = {
          {{0, 0}, {1, 0}, {1, 1}, {2, 2}}};
      for (const auto& [forward, backward] : kDepths) {
        Plan plan = now_;
        PrefetchNext(forward, backward, plan);
        add(std::move(plan));
      }
    }
  }

  // Each pattern on all blocks and on every second one.
  void Recompute(const Space& space) {
    if (in_.job.mode == JobMode::kForward || now_.recompute.empty() || options_.fixed.recompute) {
      return;  // more of it gains memory, never time
    }
    for (const RecomputePattern& pattern : space.patterns) {
      for (const std::size_t stride : {1, 2}) {
        Plan plan = now_;
        plan.recompute.clear();
        for (std::size_t i = 0; i < space.blocks.size(); i += stride) {
          AppendRegions(pattern, space.blocks[i], plan.recompute);
        }
        Try(PlanChoice::kRecompute, RecomputeText(now_), RecomputeText(plan), std::move(plan));
      }
    }
  }

  void Units(const Space& space) {
    if (options_.fixed.units) {
      return;
    }
    for (const UnitFamily& family : space.families) {
      Plan plan = now_;
      plan.units = family.units;
      KeepFullPrecision(in_.model, in_.job.precision, plan);
      std::string to = UnitsText(plan) + " (" + family.name + ")";
      Try(PlanChoice::kUnits, UnitsText(now_), std::move(to), std::move(plan));
    }
  }

  // Choices that only some dialects have, under the names that they have there.
  void Dialects() {
    if (!options_.fixed.prefetch && FactsOf(now_).is_zero &&
        now_.zero.overlap_comm != Overlap::kOn) {
      Plan plan = now_;
      plan.zero.overlap_comm = Overlap::kOn;
      Try(PlanChoice::kPrefetch, "overlap_comm off", "overlap_comm on", std::move(plan));
    }
  }

  const Problem& in_;
  const SearchOptions& options_;
  const Plan& now_;
  Evaluator evaluator_;
  Limits limits_;
  std::array<std::optional<SingleChange>, 8> best_;
  SingleChanges result_;
};

}  // namespace

std::string_view NameOf(PlanChoice choice) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "sync", "reshard", "prefetch", "offload", "recompute", "units", "batch", "mesh"};
  return kNames[static_cast<std::size_t>(choice)];
}

SingleChanges FindSingleChanges(const Problem& input, const SearchOptions& options) {
  return Finder(input, options).Run();
}

}  // namespace shardwright
