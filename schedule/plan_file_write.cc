#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/ordered_json.h"
#include "schedule/plan_file.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// Does the value's text surely take more than `bytes`? Looks at no more of it than that.
bool IsLonger(const Json& value, std::size_t bytes, std::size_t* count) {
  *count += value.is_string() ? value.get_ref<const std::string&>().size() : 1;
  for (auto child = value.begin(); value.is_structured() && child != value.end(); ++child) {
    *count += value.is_object() ? child.key().size() : 0;
    if (*count > bytes || IsLonger(*child, bytes, count)) {
      return true;
    }
  }
  return *count > bytes;
}

// Indented JSON in which every value that fits on one line stands on one.
void Print(const Json& value, std::size_t indent, std::string& out) {
  constexpr std::size_t kLine = 100;
  std::size_t count = 0;
  const bool is_long = value.is_structured() && IsLonger(value, kLine, &count);
  const std::string flat = is_long ? "" : value.dump();
  if (!value.is_structured() || value.empty() || (!is_long && indent + flat.size() <= kLine)) {
    // Spaces after ',' and ':' outside strings, as people write it.
    bool in_string = false;
    for (std::size_t i = 0; i < flat.size(); ++i) {
      out += flat[i];
      if (in_string && flat[i] == '\\') {
        out += flat[++i];
      } else if (flat[i] == '"') {
        in_string = !in_string;
      } else if (!in_string && (flat[i] == ',' || flat[i] == ':')) {
        out += ' ';
      }
    }
    return;
  }
  const bool is_object = value.is_object();
  out += is_object ? "{\n" : "[\n";
  std::size_t i = 0;
  for (const auto& [key, child] : value.items()) {
    out.append(indent + 2, ' ');
    if (is_object) {
      out += Json(key).dump() + ": ";
    }
    Print(child, indent + 2, out);
    out += ++i < value.size() ? ",\n" : "\n";
  }
  out.append(indent, ' ');
  out += is_object ? '}' : ']';
}

Json ModelPart(const LoadedModel& loaded) {
  Json json;
  json["name"] = loaded.model.name;
  if (!loaded.json.empty()) {
    json["json"] = ParseOrdered(loaded.json, loaded.model.name);
  }
  json["hash"] = HashText(loaded.hash);
  return json;
}

Json KernelSetPart(const KernelSetOptions& kernels) {
  Json json;
  json["name"] = kernels.name;
  json["attention"] = NameIn(kAttentionNames, kernels.attention);
  json["moe_dispatch"] = NameIn(kMoeDispatchNames, kernels.moe_dispatch);
  json["fused_elementwise"] = kernels.fused_elementwise;
  json["fused_rope"] = kernels.fused_rope;
  json["fused_norm"] = kernels.fused_norm;
  json["fp32_logits"] = kernels.fp32_logits;
  json["loss_chunks"] = kernels.loss_chunks;
  json["autocast_weights"] = kernels.autocast_weights;
  if (kernels.fp8 != Fp8Products::kNone) {
    json["fp8"] = NameIn(kFp8Names, kernels.fp8);
  }
  return json;
}

// Does the catalog give this very cluster under its name, but for the cores of the machine?
bool IsFromCatalog(const Cluster& cluster) {
  const std::vector<std::string> names = ListClusterNames();
  if (!std::binary_search(names.begin(), names.end(), cluster.name)) {
    return false;
  }
  Cluster listed = LoadCluster(cluster.name, cluster.node_count, cluster.gpus_per_node);
  listed.machine_cores = cluster.machine_cores;
  listed.rank_threads = cluster.rank_threads;
  return ClusterJson(listed) == ClusterJson(cluster);
}

Json ClusterPart(const Cluster& cluster) {
  const std::string text = ClusterJson(cluster);
  Json json;
  if (IsFromCatalog(cluster)) {
    json["name"] = cluster.name;
    json["nodes"] = cluster.node_count;
    json["gpus_per_node"] = cluster.gpus_per_node;
    if (cluster.machine_cores > 0) {
      json["machine_cores"] = cluster.machine_cores;
    }
    if (cluster.rank_threads > 0) {
      json["rank_threads"] = cluster.rank_threads;
    }
  } else {
    json["json"] = Json::parse(text);
  }
  json["hash"] = HashText(Fnv1a64(text));
  return json;
}

bool Ships(const Profile& profile) {
  for (const std::string& name : ListProfiles()) {
    if (name == profile.name) {
      return LoadProfile(name) == profile;
    }
  }
  return false;
}

Json ProfilePart(const Profile& profile) {
  const std::string text = ProfileJson(profile);
  Json json;
  if (Ships(profile)) {
    json["name"] = profile.name;
  } else {
    json["json"] = Json::parse(text);
  }
  json["hash"] = HashText(Fnv1a64(text));
  return json;
}

Json JobPart(const Job& job) {
  Json json;
  json["mode"] = NameIn(kJobModeNames, job.mode);
  json["sequence_length"] = job.sequence_length;
  json["global_batch"] = job.global_batch;
  json["precision"] = {{"master", NameIn(kTrainingDTypeNames, job.precision.master)},
                       {"param", NameIn(kTrainingDTypeNames, job.precision.param)},
                       {"reduce", NameIn(kTrainingDTypeNames, job.precision.reduce)}};
  json["optimizer"] = {{"kind", NameIn(kOptimizerNames, job.optimizer.kind)},
                       {"impl", NameIn(kOptimizerImplNames, job.optimizer.impl)},
                       {"weight_decay", job.optimizer.weight_decay}};
  if (job.optimizer.matrices != MatrixRule::kNone) {
    json["optimizer"]["matrices"] = NameIn(kMatrixRuleNames, job.optimizer.matrices);
  }
  if (job.optimizer.states != StateFormat::kMaster) {
    json["optimizer"]["states"] = NameIn(kStateFormatNames, job.optimizer.states);
  }
  json["clip_gradients"] = job.clip_gradients;
  json["frozen"] = job.frozen;
  json["lora_rank"] = job.lora_rank;
  if (job.lora_alpha != 0.0) {
    json["lora_alpha"] = job.lora_alpha;
  }
  json["lora_targets"] = job.lora_targets;
  if (job.lora_dropout > 0.0) {
    json["lora_dropout"] = job.lora_dropout;
  }
  if (!job.lora_saved.empty()) {
    json["lora_saved"] = job.lora_saved;
  }
  if (job.lora_magnitudes) {
    json["lora_magnitudes"] = true;
  }
  if (job.trains_by != TrainsBy::kOwn) {
    json["trains_by"] = NameIn(kTrainsByNames, job.trains_by);
  }
  if (job.frozen_format != FrozenFormat::kMaster) {
    json["frozen_format"] = NameIn(kFrozenFormatNames, job.frozen_format);
  }
  if (job.quantized_experts) {
    json["quantized_experts"] = true;
  }
  json["memory_margin"] = job.memory_margin;
  if (const AllocatorSettings& allocator = job.allocator; allocator != AllocatorSettings()) {
    json["allocator"] = {{"expandable_segments", allocator.expandable_segments},
                         {"max_split_size", FormatExact(allocator.max_split_size)},
                         {"garbage_collection_threshold", allocator.garbage_collection_threshold}};
    if (allocator.pinned_max_round_mib > 0) {
      json["allocator"]["pinned_max_round_mib"] = allocator.pinned_max_round_mib;
    }
  }
  return json;
}

Json UnitPart(const UnitPlan& unit) {
  Json json;
  json["name"] = unit.name;
  json["modules"] = unit.modules;
  if (unit.reshard.kind == Reshard::Kind::kToGroup) {
    json["reshard"] = unit.reshard.group;
  } else {
    json["reshard"] = NameIn(kReshardNames, unit.reshard.kind);
  }
  json["gap"] = NameIn(kGapNames, unit.gap);
  if (unit.full_precision) {
    json["full_precision"] = true;
  }
  json["forward_prefetch"] = unit.forward_prefetch;
  json["backward_prefetch"] = unit.backward_prefetch;
  return json;
}

Json ZeroPart(const ZeroOptions& zero) {
  Json json;
  json["reduce_bucket"] = zero.reduce_bucket;
  json["contiguous_gradients"] = zero.contiguous_gradients;
  json["overlap_comm"] = NameIn(kOverlapNames, zero.overlap_comm);
  json["gradient_reduction"] = NameIn(kGradientReductionNames, zero.gradient_reduction);
  json["allgather_bucket"] = zero.allgather_bucket;
  json["before_deepspeed_0_6"] = zero.before_deepspeed_0_6;
  json["prefetch_bucket"] = zero.prefetch_bucket;
  json["max_live_parameters"] = zero.max_live_parameters;
  json["max_reuse_distance"] = zero.max_reuse_distance;
  json["persistence_threshold"] = zero.persistence_threshold;
  json["sub_group"] = zero.sub_group;
  return json;
}

Json PlanPart(const Plan& plan) {
  Json json;
  json["dialect"] = NameIn(kDialectNames, plan.dialect);
  json["shard_size"] = plan.shard_size;
  json["replicate_size"] = plan.replicate_size;
  json["micro_batch"] = plan.micro_batch;
  json["accumulation"] = plan.accumulation;
  json["sync"] = NameIn(kSyncNames, plan.sync);
  json["offload"] = {{"parameters", plan.offload.parameters},
                     {"optimizer", plan.offload.optimizer},
                     {"activations", plan.offload.activations},
                     {"moments", plan.offload.moments}};
  if (IsTorch(plan.dialect)) {
    json["torch"] = NameIn(kTorchNames, plan.torch);
  }
  json["backward_prefetch"] = NameIn(kBackwardPrefetchNames, plan.backward_prefetch);
  json["forward_prefetch"] = plan.forward_prefetch;
  json["limit_all_gathers"] = plan.limit_all_gathers;
  json["use_orig_params"] = plan.use_orig_params;
  json["bounded_memory"] = plan.bounded_memory;
  json["in_flight"] = plan.in_flight;
  json["transfers"] = NameIn(kTransfersNames, plan.transfers);
  json["moments_piece"] = FormatExact(plan.moments_piece);
  json["first_bucket"] = FormatExact(plan.first_bucket);
  json["bucket"] = FormatExact(plan.bucket);
  json["find_unused_parameters"] = plan.find_unused_parameters;
  json["static_graph"] = plan.static_graph;
  json["zero"] = ZeroPart(plan.zero);
  json["reduce_scatter_bucket"] = FormatExact(plan.reduce_scatter_bucket);
  json["recompute"] = Json::array();
  for (const RecomputeRegion& region : plan.recompute) {
    json["recompute"].push_back({{"module", region.module},
                                 {"kind", NameIn(kRecomputeNames, region.kind)},
                                 {"keep_every", region.keep_every}});
  }
  json["units"] = Json::array();
  for (const UnitPlan& unit : plan.units) {
    json["units"].push_back(UnitPart(unit));
  }
  return json;
}

}  // namespace

std::string PlanFileJson(const PlanFile& file) {
  return PlanFileJson(file, "");
}

std::string PlanFileJson(const PlanFile& file, std::string_view imported_from) {
  Json json;
  json["format"] = "shardwright-plan";
  json["version"] = 1;
  if (!imported_from.empty()) {
    json["imported_from"] = imported_from;
  }
  json["model"] = ModelPart(file.model);
  json["kernel_set"] = KernelSetPart(file.kernels);
  json["cluster"] = ClusterPart(file.cluster);
  json["profile"] = ProfilePart(file.profile);
  json["job"] = JobPart(file.job);
  json["plan"] = PlanPart(file.plan);
  std::string text;
  Print(json, 0, text);
  return text + "\n";
}

}  // namespace shardwright
