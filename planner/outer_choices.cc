// The choices that hold for a whole step: mesh, micro-batch, sync and offload. Space has the rest.

#include <utility>

#include "core/error.h"
#include "core/ranges.h"
#include "models/cut_context.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {
namespace {

// 12 gives 1, 2, 3, 4, 6, 12. O(sqrt(n)).
std::vector<std::int64_t> DivisorsOf(std::int64_t n) {
  std::vector<std::int64_t> low, high;
  for (std::int64_t d = 1; d * d <= n; ++d) {
    if (n % d == 0) {
      low.push_back(d);
      if (d != n / d) {
        high.push_back(n / d);
      }
    }
  }
  low.insert(low.end(), high.rbegin(), high.rend());
  return low;
}

// The divisors of the ranks, unless the plan fixes the mesh or the dialect has one mesh only. With
// experts shared out over e ranks, multiples of e.
std::vector<std::int64_t> ShardSizes(const Problem& input, const SearchOptions& options) {
  const std::int64_t context = options.base.context_size;
  const std::int64_t ranks = DataRanks(input.cluster, MeshOf(options.base)) * context;
  if (options.fixed.mesh) {
    return {options.base.shard_size};
  }
  switch (FactsOf(options.base).mesh) {
    case MeshChoice::kReplicas:
      return {1};
    case MeshChoice::kOneShardGroup:
      return {ranks};
    case MeshChoice::kAny:
      break;
  }
  std::vector<std::int64_t> sizes = DivisorsOf(ranks);
  std::erase_if(sizes, [&](std::int64_t size) {
    const bool is_ring = IsRing(options.base.context_method);
    return size % options.base.expert_size != 0 || size % context != 0 || (is_ring && size < ranks);
  });
  if (sizes.empty()) {
    throw InputError("--shard: ep", std::to_string(options.base.expert_size),
                     "a divisor of the " + std::to_string(ranks) + " ranks");
  }
  return sizes;
}

// Each set of things that may live on the host: nothing, the optimizer, its moments or the
// parameters, each alone, and each of these with activations as well. Packed states stay on the
// device. Moments are left out if all of them would be in flight at once anyway.
std::vector<Offload> Offloads(const Problem& input, const SearchOptions& options,
                              std::int64_t shard_size) {
  if (options.fixed.offload) {
    return {options.base.offload};
  }
  const Offload can = options.base.tensor_size > 1 ? Offload() : FactsOf(options.base).offload;
  const bool is_train = input.job.mode == JobMode::kTrain;
  const bool is_packed = input.job.optimizer.states != StateFormat::kMaster;
  std::vector<Offload> choices = {{}};
  if (can.optimizer && is_train && !is_packed) {
    choices.push_back({.optimizer = true});
  }
  if (can.moments && is_train && !is_packed) {
    // Moments that would all be in flight at once are not offloaded.
    const std::int64_t moments = StateCount(input.job.optimizer.kind) *
                                 CountParameters(input.model, true) / shard_size *
                                 SizeOf(input.job.precision.master);
    if (moments > MostMomentsInFlight(options).value) {
      choices.push_back({.moments = true});
    }
  }
  if (can.parameters && !(is_packed && is_train) && options.base.expert_size == 1) {
    choices.push_back({.parameters = true});
  }
  if (is_train && can.activations) {
    const std::size_t count = choices.size();
    for (std::size_t i = 0; i < count; ++i) {
      choices.push_back(choices[i]);
      choices.back().activations = true;
    }
  }
  return choices;
}

std::vector<SyncMode> SyncModes(const OuterChoice& outer, const Problem& input,
                                const SearchOptions& options) {
  const DialectFacts& facts = FactsOf(options.base);
  if (options.fixed.sync) {
    return {options.base.sync};
  }
  if (outer.accumulation == 1 || !facts.skips_sync || input.job.mode == JobMode::kForward) {
    return {SyncMode::kEvery};
  }
  if (outer.replicate_size > 1 && outer.shard_size > 1 && facts.has_groups) {
    return {SyncMode::kEvery, SyncMode::kReplicateLast, SyncMode::kLast};
  }
  return {SyncMode::kEvery, SyncMode::kLast};
}

// Otherwise CheckOffloadedSums of check_plan_options.cc refuses the plan.
bool AddsUp(const OuterChoice& outer, const Problem& input, const SearchOptions& options) {
  return FactsOf(options.base).adds_on_host || input.job.mode == JobMode::kForward ||
         !outer.offload.parameters || outer.accumulation == 1 || outer.sync != SyncMode::kEvery;
}

}  // namespace

std::vector<OuterChoice> OuterChoices(const Problem& input, const SearchOptions& options) {
  const std::int64_t ranks = DataRanks(input.cluster, MeshOf(options.base));
  const std::int64_t batch = input.job.global_batch;
  const std::int64_t samples = SamplesPerExample(input.job.trains_by);
  if (batch <= 0 || batch % (ranks * samples) != 0) {
    throw InputError("job", "a global batch of " + std::to_string(batch),
                     "a multiple of the " + std::to_string(ranks) + " ranks" +
                         (samples > 1 ? " x 2 samples of a pair" : ""));
  }
  const std::int64_t per_rank = batch / ranks;
  std::vector<std::int64_t> micro_batches = DivisorsOf(per_rank);
  if (options.fixed.micro_batch) {
    if (per_rank % options.base.micro_batch != 0) {
      throw InputError("job", "micro-batches of " + std::to_string(options.base.micro_batch),
                       "a divisor of the " + std::to_string(per_rank) + " samples per rank");
    }
    micro_batches = {options.base.micro_batch};
  }
  Pipeline pipeline = PipelineOf(options.base);
  std::erase_if(micro_batches, [&](std::int64_t micro_batch) {
    pipeline.micro_batches = per_rank / micro_batch;
    return pipeline.ranks > 1 && !WhyNot(pipeline).empty();
  });
  if (micro_batches.empty()) {
    throw InputError("job", std::to_string(per_rank) + " samples per data-parallel rank",
                     WhyNot(pipeline));
  }
  std::vector<OuterChoice> result;
  for (const std::int64_t shard : ShardSizes(input, options)) {
    for (const std::int64_t micro_batch : micro_batches) {
      if (micro_batch % samples != 0) {
        continue;  // ValidatePlan refuses half a pair
      }
      constexpr std::int64_t kMostMicroBatches = 65535;  // Op::micro_batch has 16 bits
      if (per_rank / micro_batch > kMostMicroBatches) {
        continue;
      }
      OuterChoice outer;
      outer.shard_size = shard;
      outer.tensor_size = options.base.tensor_size;
      outer.context_size = options.base.context_size;
      outer.replicate_size =
          MeshOver(ranks * outer.context_size, {{0, shard}}).Along(Axis::kReplicate);
      outer.micro_batch = micro_batch;
      outer.accumulation = per_rank / micro_batch;
      for (const SyncMode sync : SyncModes(outer, input, options)) {
        outer.sync = sync;
        for (const Offload& offload : Offloads(input, options, shard)) {
          outer.offload = offload;
          if (AddsUp(outer, input, options)) {
            result.push_back(outer);
          }
        }
      }
    }
  }
  return result;
}

int CountOf(const Offload& offload) {
  return static_cast<int>(offload.parameters) + static_cast<int>(offload.optimizer) +
         static_cast<int>(offload.activations) + static_cast<int>(offload.moments);
}

std::string FamilyName(const OuterChoice& outer, const SearchOptions& options) {
  std::string name;
  if (FactsOf(options.base).is_zero) {
    name = NameOf(options.base.dialect);
  } else if (outer.shard_size == 1) {
    name = outer.tensor_size > 1 ? "tensor" : "ddp";
  } else {
    name = outer.replicate_size == 1 ? "sharded" : "hybrid";
  }
  if (options.base.pipeline_size > 1) {
    name += " x pipeline " + std::to_string(options.base.pipeline_size) +
            (options.base.pipeline_stages > 1 ? "x" + std::to_string(options.base.pipeline_stages)
                                              : "");
  }
  std::string offload;
  const auto add = [&](bool is_on, const char* what) {
    if (is_on) {
      offload += (offload.empty() ? ", " : " and ") + std::string(what);
    }
  };
  add(outer.offload.parameters, "parameters");
  add(outer.offload.optimizer, "optimizer");
  add(outer.offload.activations, "activations");
  add(outer.offload.moments, "moments");
  return offload.empty() ? name : name + offload + " on the host";
}

std::vector<Group> GroupsOf(const OuterChoice& outer) {
  const GroupShape shard = MeshOf(outer).Of({Axis::kShard});
  const GroupShape replicate = MeshOf(outer).Of({Axis::kReplicate});
  return {{"shard", shard.size, shard.stride}, {"replicate", replicate.size, replicate.stride}};
}

std::string LabelOf(const OuterChoice& outer) {
  return "shard " + std::to_string(outer.shard_size) + " x replicate " +
         std::to_string(outer.replicate_size) +
         (outer.tensor_size > 1 ? " x tensor " + std::to_string(outer.tensor_size) : "") +
         (outer.context_size > 1 ? ", context " + std::to_string(outer.context_size) : "") +
         ", micro-batch " + std::to_string(outer.micro_batch) + " x " +
         std::to_string(outer.accumulation);
}

bool Is(const OuterChoice& outer, const Plan& plan) {
  return outer.shard_size == plan.shard_size && outer.replicate_size == plan.replicate_size &&
         outer.micro_batch == plan.micro_batch && outer.accumulation == plan.accumulation &&
         outer.sync == plan.sync && outer.offload == plan.offload;
}

void SetOuter(const OuterChoice& outer, Plan& plan) {
  plan.shard_size = outer.shard_size;
  plan.replicate_size = outer.replicate_size;
  plan.micro_batch = outer.micro_batch;
  plan.accumulation = outer.accumulation;
  plan.sync = outer.sync;
  plan.offload = outer.offload;
}

std::int64_t DataRanks(const Cluster& cluster, const Mesh& cut) {
  const std::int64_t ranks = cluster.RankCount();
  const Mesh mesh = MeshOver(
      ranks,
      {.size = {1, 0}, .tensor = cut.tensor, .context = cut.context, .pipeline = cut.pipeline});
  const bool is_whole = mesh.RankCount() == ranks;
  if (!is_whole || !mesh.SplitsInto(cut.context)) {
    const std::int64_t cut_by = cut.tensor * cut.pipeline;
    const auto [kind, size] = is_whole            ? std::pair("cp", cut.context)
                              : cut.tensor == 1   ? std::pair("pp", cut.pipeline)
                              : cut.pipeline == 1 ? std::pair("tp", cut.tensor)
                                                  : std::pair("tp x pp", cut_by);
    throw InputError(std::string("--shard: ") + kind, std::to_string(size),
                     "a divisor of the " + std::to_string(is_whole ? mesh.CopyCount() : ranks) +
                         (is_whole && cut_by > 1 ? " ranks that tp and pp leave" : " ranks"));
  }
  return mesh.DataCount();
}

Plan OuterPlan(const OuterChoice& outer, const SearchOptions& options) {
  Plan plan = options.base;
  SetOuter(outer, plan);
  plan.units.clear();
  if (!options.fixed.recompute) {
    plan.recompute.clear();
  }
  return plan;
}

}  // namespace shardwright
