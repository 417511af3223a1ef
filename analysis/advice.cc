#include "analysis/advice.h"

#include <array>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {
namespace {

std::string Count(double value) {
  return Fixed(value, "%.0f");
}

std::string Part(double part, double whole) {
  return Fixed(whole > 0 ? 100 * part / whole : 0, "%.0f %%");
}

// Lines that say a choice. Dialects without a row have a setting of their own, which the patch
// shows.
struct Line {
  AdviceTopic topic;
  Dialect dialect;
  const char* text;
};
constexpr std::array kLines = {
    Line{AdviceTopic::kSync, Dialect::kFsdp2, "model.set_requires_gradient_sync(is_last)"},
    Line{AdviceTopic::kSync, Dialect::kFsdp1, "with model.no_sync(): for all but the last"},
    Line{AdviceTopic::kSync, Dialect::kDdp, "with model.no_sync(): for all but the last"},
    Line{AdviceTopic::kReshard, Dialect::kFsdp2, "fully_shard(block, reshard_after_forward=...)"},
    Line{AdviceTopic::kReshard, Dialect::kFsdp1,
         "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP"},
    Line{AdviceTopic::kPrefetch, Dialect::kFsdp2, "block.set_modules_to_forward_prefetch([...])"},
    Line{AdviceTopic::kPrefetch, Dialect::kFsdp1,
         "backward_prefetch=BackwardPrefetch.BACKWARD_PRE, forward_prefetch=..."},
    Line{AdviceTopic::kOffload, Dialect::kFsdp2,
         "fully_shard(..., offload_policy=OffloadPolicy())"},
    Line{AdviceTopic::kOffload, Dialect::kFsdp1, "cpu_offload=None"},
    Line{AdviceTopic::kUnits, Dialect::kFsdp2,
         "fully_shard(block) for each block, then fully_shard(model)"},
    Line{AdviceTopic::kUnits, Dialect::kFsdp1, "auto_wrap_policy=ModuleWrapPolicy({Block})"},
    Line{AdviceTopic::kMesh, Dialect::kFsdp2,
         "init_device_mesh(\"cuda\", (replicate, shard), mesh_dim_names=...)"},
    Line{AdviceTopic::kMesh, Dialect::kFsdp1, "sharding_strategy=ShardingStrategy.HYBRID_SHARD"},
};
constexpr std::array kOtherLines = {
    std::pair{AdviceTopic::kDataLoader,
              "DataLoader(num_workers=..., pin_memory=True, prefetch_factor=...)"},
    std::pair{AdviceTopic::kSmallKernels, "torch.compile(block), or larger micro-batches"},
    std::pair{AdviceTopic::kGraphBreaks, "TORCH_LOGS=graph_breaks tells where"},
    std::pair{AdviceTopic::kStragglers, "compare the ranks' compute times"},
};

std::string LineOf(AdviceTopic topic, Dialect dialect) {
  for (const Line& line : kLines) {
    if (line.topic == topic && line.dialect == dialect) {
      return line.text;
    }
  }
  for (const auto& [other, text] : kOtherLines) {
    if (other == topic) {
      return text;
    }
  }
  return "";
}

Effort EffortOf(AdviceTopic topic) {
  using enum AdviceTopic;
  return topic <= kRecompute || topic == kDataLoader ? Effort::kLine
         : topic == kUnits || topic == kBatch        ? Effort::kScript
                                                     : Effort::kPlatform;
}

double SumOf(const StepCosts& costs, double UnitCosts::*field) {
  const double sum = Summed<double>(costs.units, field);
  return sum;
}

double GatherBytes(const UnitCosts& unit) {
  return static_cast<double>(unit.gathered.value);
}

// The unit that has more than half of all gathered bytes, of several units or of one that is all;
// null: none has.
const UnitCosts* LargestUnit(const StepCosts& costs) {
  if (!costs.names_units) {
    return nullptr;
  }
  double sum = 0;
  const UnitCosts* largest = nullptr;
  for (const UnitCosts& unit : costs.units) {
    sum += GatherBytes(unit);
    if (unit.gathers > 0 && (largest == nullptr || unit.gathered > largest->gathered)) {
      largest = &unit;
    }
  }
  return largest != nullptr && 2 * GatherBytes(*largest) > sum ? largest : nullptr;
}

double ReductionsOf(const UnitCosts& unit) {
  return unit.reductions > 0 ? unit.reductions : unit.all_reductions;
}

bool ReducesEach(const StepCosts& costs) {
  constexpr double kAll = 0.99;
  return costs.micro_batches > 1 && !costs.units.empty() &&
         AllOf(costs.units, [&](const UnitCosts& unit) {
           return ReductionsOf(unit) == 0 ||
                  ReductionsOf(unit) >= kAll * static_cast<double>(costs.micro_batches);
         });
}

// One line of evidence per topic, in the trace's own words; empty where it shows nothing.
class SeenInTrace {
 public:
  explicit SeenInTrace(const StepCosts& costs) : costs_(costs) {}

  [[nodiscard]] std::string Of(AdviceTopic topic) const {
    switch (topic) {
      case AdviceTopic::kSync:
        return Sync();
      case AdviceTopic::kReshard:
        return Count(SumOf(costs_, &UnitCosts::backward_gathers)) + " of " +
               Count(SumOf(costs_, &UnitCosts::gathers)) +
               " gathers a step are for backward; compute waits " +
               Time(SumOf(costs_, &UnitCosts::backward_exposed)) + " for them";
      case AdviceTopic::kPrefetch:
        return Count(SumOf(costs_, &UnitCosts::late_gathers)) + " of " +
               Count(SumOf(costs_, &UnitCosts::gathers)) +
               " gathers a step begin when compute waits already, for " +
               Time(SumOf(costs_, &UnitCosts::late_exposed));
      case AdviceTopic::kOffload:
        return "copies between host and GPU take " + Time(costs_.copies_busy) +
               " of a step; compute waits " + Time(costs_.copies_exposed) + " for them, and " +
               Time(costs_.host_updates) + " for the optimizer on the host";
      case AdviceTopic::kUnits:
        return Units();
      case AdviceTopic::kBatch:
        return costs_.micro_batches > 1
                   ? std::to_string(costs_.micro_batches) + " micro-batches a step, each with " +
                         Count(SumOf(costs_, &UnitCosts::gathers) /
                               static_cast<double>(costs_.micro_batches)) +
                         " gathers"
                   : "";
      case AdviceTopic::kMesh:
        return "compute waits " + Time(costs_.Exposed()) + " of a step for gathers and reductions";
      case AdviceTopic::kRecompute:
        return "";
      default:
        return Other(topic);
    }
  }

 private:
  [[nodiscard]] std::string Time(double seconds) const {
    return Format(Seconds(seconds)) + " (" + Part(seconds, costs_.parts.period) + ")";
  }

  [[nodiscard]] std::string Sync() const {
    const double reductions =
        Summed<double>(costs_.units, [&](const UnitCosts& unit) { return ReductionsOf(unit); });
    return Count(reductions) + " reductions in a step of " + std::to_string(costs_.micro_batches) +
           " micro-batches take " + Time(SumOf(costs_, &UnitCosts::reduce_busy)) +
           "; compute waits " + Time(SumOf(costs_, &UnitCosts::reduce_exposed)) + " for them";
  }

  [[nodiscard]] std::string Units() const {
    const UnitCosts* largest = LargestUnit(costs_);
    if (largest == nullptr) {
      return std::to_string(costs_.units.size()) + " units; compute waits " +
             Time(costs_.Exposed()) + " for them";
    }
    const double sum =
        Summed<double>(costs_.units, [&](const UnitCosts& unit) { return GatherBytes(unit); });
    return "unit " + largest->unit + " has " + Part(GatherBytes(*largest), sum) +
           " of all gathered bytes; compute waits " + Time(largest->Exposed()) + " for it";
  }

  [[nodiscard]] std::string Other(AdviceTopic topic) const {
    switch (topic) {
      case AdviceTopic::kDataLoader:
        return "nothing computes while the loop waits for the next batch, for " +
               Time(costs_.data_loading);
      case AdviceTopic::kSmallKernels:
        return Count(costs_.kernels) + " pieces of work a step; the device is idle " +
               Time(costs_.HostIdle()) + " for want of the next";
      case AdviceTopic::kGraphBreaks:
        return Count(costs_.compiled_regions) + " compiled graphs are called in a step; idle " +
               Time(costs_.HostIdle());
      default:
        return "compute waits " + Time(costs_.parts.peers) + " for other ranks";
    }
  }

  const StepCosts& costs_;
};

Advice Make(AdviceTopic topic, std::string what, double gain, const StepCosts& costs,
            Dialect dialect) {
  Advice advice;
  advice.topic = topic;
  advice.effort = EffortOf(topic);
  advice.what = std::move(what);
  advice.seen = SeenInTrace(costs).Of(topic);
  advice.how = LineOf(topic, dialect);
  advice.gain = gain;
  return advice;
}

// What is about FSDP, by the trace alone.
void AddFsdp(const StepCosts& costs, Dialect dialect, std::vector<Advice>& list) {
  const auto add = [&](AdviceTopic topic, std::string what, double gain) {
    list.push_back(Make(topic, std::move(what), gain, costs, dialect));
  };
  const double reduced = SumOf(costs, &UnitCosts::reduce_exposed);
  if (ReducesEach(costs)) {
    add(AdviceTopic::kSync, "reduce gradients after the last micro-batch, not after each",
        reduced * (1 - 1.0 / static_cast<double>(costs.micro_batches)));
  }
  add(AdviceTopic::kOffload, "keep on the GPU what is offloaded to the host",
      costs.copies_exposed + costs.host_updates);
  // Where the host computes, gathers take the cores that they would run beside: neither smaller nor
  // earlier ones would be hidden.
  const UnitCosts* largest = costs.on_device ? LargestUnit(costs) : nullptr;
  if (largest != nullptr) {
    add(AdviceTopic::kUnits, "cut unit " + largest->unit + " into its blocks", largest->Exposed());
  }
  double late = 0, again = 0;
  for (const UnitCosts& unit : costs.units) {
    late += &unit == largest ? 0 : unit.late_exposed;
    // A unit that is gathered only for backward keeps nothing from forward.
    again += unit.gathers > unit.backward_gathers ? unit.backward_exposed : 0;
  }
  add(AdviceTopic::kReshard, "keep gathered parameters from forward to backward", again);
  if (costs.on_device) {
    add(AdviceTopic::kPrefetch, "gather the next unit while the one before computes", late);
  }
}

// The rest, which no plan knows.
void AddOther(const StepCosts& costs, Dialect dialect, std::vector<Advice>& list) {
  const auto add = [&](AdviceTopic topic, std::string what, double gain) {
    list.push_back(Make(topic, std::move(what), gain, costs, dialect));
  };
  add(AdviceTopic::kDataLoader, "load the next batches in the background", costs.data_loading);
  add(AdviceTopic::kStragglers, "find out why some ranks are late", costs.parts.peers);
  // Where the host computes, it is never ahead of itself.
  if (!costs.on_device) {
    return;
  }
  // One graph per block is what people compile; more of them begin behind breaks.
  constexpr double kManyGraphs = 2;
  const double blocks = std::max<double>(static_cast<double>(costs.units.size()), 1);
  const bool breaks =
      costs.compiled_regions > kManyGraphs * blocks * 2 * static_cast<double>(costs.micro_batches);
  if (breaks) {
    add(AdviceTopic::kGraphBreaks, "remove the graph breaks of torch.compile", costs.HostIdle());
  } else {
    add(AdviceTopic::kSmallKernels, "launch fewer and larger kernels", costs.HostIdle());
  }
}

double PerEffort(double seconds, const Advice& advice) {
  return seconds / static_cast<double>(advice.effort);
}

// By gain over effort; of predictions that cannot be told apart the one that takes less memory.
std::vector<Advice> Ranked(std::vector<Advice> list, double step) {
  std::erase_if(list, [&](const Advice& advice) {
    return advice.gain < std::max(kLeastGain * step, advice.band);
  });
  StableSort(list, [](const Advice& a, const Advice& b) {
    return PerEffort(a.gain, a) > PerEffort(b.gain, b);
  });
  for (auto first = list.begin(); first != list.end(); ++first) {
    const auto is_open = [&](const Advice& other) {
      return first->is_predicted && other.is_predicted &&
             PerEffort(other.gain + other.band, other) >=
                 PerEffort(first->gain - first->band, *first);
    };
    auto best = first;
    for (auto other = first + 1; other != list.end(); ++other) {
      best = is_open(*other) && *other->memory < *best->memory ? other : best;
    }
    std::rotate(first, best, best + 1);
  }
  return list;
}

constexpr std::array<const char*, 8> kVerbs = {"reduce gradients ", "after forward, parameters: ",
                                               "prefetch: ",        "offload ",
                                               "recompute ",        "gather in ",
                                               "micro-batch: ",     "mesh: "};

std::string WhatOf(const SingleChange& change) {
  return kVerbs[static_cast<std::size_t>(change.choice)] + change.to + ", not " + change.from;
}

}  // namespace

std::string_view NameOf(AdviceTopic topic) {
  static constexpr std::array<std::string_view, 12> kNames = {
      "sync",  "reshard", "prefetch",    "offload",       "recompute",    "units",
      "batch", "mesh",    "data loader", "small kernels", "graph breaks", "stragglers"};
  return kNames[static_cast<std::size_t>(topic)];
}

std::string_view NameOf(Effort effort) {
  static constexpr std::array<std::string_view, 3> kNames = {"a line", "the script",
                                                             "launch or model"};
  return kNames[static_cast<std::size_t>(effort) - 1];
}

std::vector<Advice> AdviceOf(const StepCosts& costs, Dialect dialect) {
  std::vector<Advice> list;
  AddFsdp(costs, dialect, list);
  AddOther(costs, dialect, list);
  return Ranked(std::move(list), costs.parts.period);
}

std::vector<Advice> AdviceOf(const StepCosts& costs, const Plan& plan, const SingleChanges& changes,
                             const std::vector<double>& bands) {
  SW_CHECK(bands.size() == changes.best.size(), "a band for each change");
  std::vector<Advice> list;
  for (std::size_t i = 0; i < changes.best.size(); ++i) {
    const SingleChange& change = changes.best[i];
    const auto topic = static_cast<AdviceTopic>(change.choice);
    const double part = 1 - change.step_time.value / changes.step_time.value;
    Advice advice = Make(topic, WhatOf(change), part * costs.parts.period, costs, plan.dialect);
    advice.band = bands[i] * costs.parts.period;
    advice.is_predicted = true;
    advice.memory = (change.memory - changes.memory).value;
    advice.change = i;
    list.push_back(std::move(advice));
  }
  AddOther(costs, plan.dialect, list);
  return Ranked(std::move(list), costs.parts.period);
}

bool HasFsdpProblem(const StepCosts& costs, const std::vector<Advice>& advice) {
  constexpr double kProblem = 0.02;
  return AnyOf(advice, [&](const Advice& a) {
    return IsAboutFsdp(a.topic) && a.gain >= kProblem * costs.parts.period;
  });
}

}  // namespace shardwright
