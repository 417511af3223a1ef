#include "schedule/internal/plan_json.h"

#include <optional>
#include <string>

#include "schedule/plan_names.h"

namespace shardwright::internal {
namespace {

constexpr std::int64_t kMaxRanks = std::int64_t{1} << 24;

template <class E>
E ReadChoice(const JsonValue& json, NameList names) {
  return static_cast<E>(json.AsChoice(names));
}

template <class E>
void SetChoice(const JsonValue& json, std::string_view key, NameList names, E& value) {
  if (const std::optional<JsonValue> found = json.Find(key)) {
    value = ReadChoice<E>(*found, names);
  }
}

void SetBool(const JsonValue& json, std::string_view key, bool& value) {
  if (const std::optional<JsonValue> found = json.Find(key)) {
    value = found->AsBool();
  }
}

void SetInt(const JsonValue& json, std::string_view key, std::int64_t min, std::int64_t max,
            std::int64_t& value) {
  if (const std::optional<JsonValue> found = json.Find(key)) {
    value = found->AsInt(min, max);
  }
}

std::vector<std::string> ReadStrings(const JsonValue& json) {
  if (!json.IsArray()) {
    throw json.Error("a list of strings");
  }
  std::vector<std::string> strings;
  for (std::size_t i = 0; i < json.size(); ++i) {
    strings.push_back(json[i].AsString());
  }
  return strings;
}

void SetStrings(const JsonValue& json, std::string_view key, std::vector<std::string>& value) {
  if (const std::optional<JsonValue> found = json.Find(key)) {
    value = ReadStrings(*found);
  }
}

Reshard ReadReshard(const JsonValue& json) {
  Reshard reshard;
  if (json.IsNumber()) {
    reshard.kind = Reshard::Kind::kToGroup;
    reshard.group = json.AsInt(1, kMaxRanks);
    return reshard;
  }
  if (!json.IsString()) {
    throw json.Error("\"always\", \"never\" or a number of ranks");
  }
  reshard.kind = ReadChoice<Reshard::Kind>(json, kReshardNames);
  return reshard;
}

std::string DefaultUnitName(const std::vector<std::string>& modules) {
  if (modules == std::vector<std::string>{""}) {
    return "root";
  }
  std::string name;
  for (const std::string& fqn : modules) {
    name += (name.empty() ? "" : "+") + fqn;
  }
  return name;
}

UnitPlan ReadUnit(const JsonValue& json) {
  json.AllowOnly({"name", "modules", "reshard", "gap", "full_precision", "forward_prefetch",
                  "backward_prefetch"});
  UnitPlan unit;
  unit.modules = ReadStrings(json.At("modules"));
  const std::optional<JsonValue> name = json.Find("name");
  unit.name = name ? name->AsString() : DefaultUnitName(unit.modules);
  if (const std::optional<JsonValue> reshard = json.Find("reshard")) {
    unit.reshard = ReadReshard(*reshard);
  }
  SetChoice(json, "gap", kGapNames, unit.gap);
  SetBool(json, "full_precision", unit.full_precision);
  SetStrings(json, "forward_prefetch", unit.forward_prefetch);
  SetStrings(json, "backward_prefetch", unit.backward_prefetch);
  return unit;
}

std::vector<RecomputeRegion> ReadRecompute(const JsonValue& json) {
  if (!json.IsArray()) {
    throw json.Error("a list of recompute regions");
  }
  std::vector<RecomputeRegion> regions;
  for (std::size_t i = 0; i < json.size(); ++i) {
    const JsonValue entry = json[i];
    entry.AllowOnly({"module", "kind", "keep_every"});
    RecomputeRegion region;
    region.module = entry.At("module").AsString();
    SetChoice(entry, "kind", kRecomputeNames, region.kind);
    SetInt(entry, "keep_every", 1, JsonValue::kMaxCount, region.keep_every);
    regions.push_back(region);
  }
  return regions;
}

Precision ReadPrecision(const JsonValue& json) {
  json.AllowOnly({"master", "param", "reduce"});
  Precision precision;
  SetChoice(json, "master", kTrainingDTypeNames, precision.master);
  SetChoice(json, "param", kTrainingDTypeNames, precision.param);
  SetChoice(json, "reduce", kTrainingDTypeNames, precision.reduce);
  return precision;
}

OptimizerSpec ReadOptimizer(const JsonValue& json) {
  json.AllowOnly({"kind", "impl", "weight_decay", "matrices", "states"});
  OptimizerSpec optimizer;
  SetChoice(json, "kind", kOptimizerNames, optimizer.kind);
  SetChoice(json, "impl", kOptimizerImplNames, optimizer.impl);
  SetBool(json, "weight_decay", optimizer.weight_decay);
  SetChoice(json, "matrices", kMatrixRuleNames, optimizer.matrices);
  SetChoice(json, "states", kStateFormatNames, optimizer.states);
  return optimizer;
}

Offload ReadOffload(const JsonValue& json) {
  json.AllowOnly({"parameters", "optimizer", "activations", "moments"});
  Offload offload;
  SetBool(json, "parameters", offload.parameters);
  SetBool(json, "optimizer", offload.optimizer);
  SetBool(json, "activations", offload.activations);
  SetBool(json, "moments", offload.moments);
  return offload;
}

ZeroOptions ReadZero(const JsonValue& json) {
  json.AllowOnly({"reduce_bucket", "contiguous_gradients", "overlap_comm", "gradient_reduction",
                  "allgather_bucket", "before_deepspeed_0_6", "prefetch_bucket",
                  "max_live_parameters", "max_reuse_distance", "persistence_threshold",
                  "sub_group"});
  ZeroOptions zero;
  SetInt(json, "reduce_bucket", 1, JsonValue::kMaxCount, zero.reduce_bucket);
  SetBool(json, "contiguous_gradients", zero.contiguous_gradients);
  SetChoice(json, "overlap_comm", kOverlapNames, zero.overlap_comm);
  SetChoice(json, "gradient_reduction", kGradientReductionNames, zero.gradient_reduction);
  SetInt(json, "allgather_bucket", 0, JsonValue::kMaxCount, zero.allgather_bucket);
  SetBool(json, "before_deepspeed_0_6", zero.before_deepspeed_0_6);
  SetInt(json, "prefetch_bucket", 0, JsonValue::kMaxCount, zero.prefetch_bucket);
  SetInt(json, "max_live_parameters", 0, JsonValue::kMaxCount, zero.max_live_parameters);
  SetInt(json, "max_reuse_distance", 0, JsonValue::kMaxCount, zero.max_reuse_distance);
  SetInt(json, "persistence_threshold", 0, JsonValue::kMaxCount, zero.persistence_threshold);
  SetInt(json, "sub_group", 1, JsonValue::kMaxCount, zero.sub_group);
  return zero;
}

}  // namespace

std::vector<UnitPlan> ReadUnits(const JsonValue& json) {
  if (!json.IsArray()) {
    throw json.Error("a list of units");
  }
  std::vector<UnitPlan> units;
  for (std::size_t i = 0; i < json.size(); ++i) {
    units.push_back(ReadUnit(json[i]));
  }
  return units;
}

AllocatorSettings ReadAllocator(const JsonValue& json) {
  json.AllowOnly({"expandable_segments", "max_split_size", "garbage_collection_threshold",
                  "pinned_max_round_mib"});
  AllocatorSettings settings;
  SetBool(json, "expandable_segments", settings.expandable_segments);
  if (const std::optional<JsonValue> split = json.Find("max_split_size")) {
    settings.max_split_size = split->AsBytes();
  }
  if (const std::optional<JsonValue> most = json.Find("pinned_max_round_mib")) {
    settings.pinned_max_round_mib = static_cast<std::int32_t>(most->AsInt(0, 1 << 20));
  }
  if (const std::optional<JsonValue> threshold = json.Find("garbage_collection_threshold")) {
    settings.garbage_collection_threshold = threshold->AsDouble();
  }
  return settings;
}

Job ReadJob(const JsonValue& json) {
  json.AllowOnly({"mode", "sequence_length", "global_batch", "precision", "optimizer",
                  "clip_gradients", "frozen", "lora_rank", "lora_alpha", "lora_targets",
                  "lora_dropout", "lora_saved", "lora_magnitudes", "trains_by", "frozen_format",
                  "quantized_experts", "memory_margin", "allocator"});
  Job job;
  SetChoice(json, "mode", kJobModeNames, job.mode);
  job.sequence_length = json.At("sequence_length").AsInt(1, std::int64_t{1} << 30);
  SetInt(json, "global_batch", 0, std::int64_t{1} << 40, job.global_batch);
  if (const std::optional<JsonValue> precision = json.Find("precision")) {
    job.precision = ReadPrecision(*precision);
  }
  if (const std::optional<JsonValue> optimizer = json.Find("optimizer")) {
    job.optimizer = ReadOptimizer(*optimizer);
  }
  SetBool(json, "clip_gradients", job.clip_gradients);
  SetStrings(json, "frozen", job.frozen);
  SetInt(json, "lora_rank", 0, std::int64_t{1} << 20, job.lora_rank);
  if (const std::optional<JsonValue> alpha = json.Find("lora_alpha")) {
    job.lora_alpha = alpha->AsDouble();
    if (!(job.lora_alpha > 0.0 && job.lora_alpha <= kMaxLoraAlpha)) {
      throw alpha->Error("a number above 0, at most 1e6");
    }
  }
  SetStrings(json, "lora_targets", job.lora_targets);
  if (const std::optional<JsonValue> dropout = json.Find("lora_dropout")) {
    job.lora_dropout = dropout->AsDouble();
    if (!(job.lora_dropout >= 0.0 && job.lora_dropout < 1.0)) {
      throw dropout->Error("a fraction in [0, 1)");
    }
  }
  SetStrings(json, "lora_saved", job.lora_saved);
  SetBool(json, "lora_magnitudes", job.lora_magnitudes);
  SetChoice(json, "trains_by", kTrainsByNames, job.trains_by);
  SetChoice(json, "frozen_format", kFrozenFormatNames, job.frozen_format);
  SetBool(json, "quantized_experts", job.quantized_experts);
  if (const std::optional<JsonValue> margin = json.Find("memory_margin")) {
    job.memory_margin = margin->AsDouble();
    if (!(job.memory_margin >= 0.0 && job.memory_margin < 1.0)) {
      throw margin->Error("a fraction in [0, 1)");
    }
  }
  if (const std::optional<JsonValue> allocator = json.Find("allocator")) {
    job.allocator = ReadAllocator(*allocator);
  }
  return job;
}

Plan ReadPlan(const JsonValue& json) {
  json.AllowOnly({"dialect",
                  "shard_size",
                  "replicate_size",
                  "micro_batch",
                  "accumulation",
                  "sync",
                  "offload",
                  "torch",
                  "backward_prefetch",
                  "forward_prefetch",
                  "limit_all_gathers",
                  "use_orig_params",
                  "bounded_memory",
                  "in_flight",
                  "transfers",
                  "moments_piece",
                  "first_bucket",
                  "bucket",
                  "find_unused_parameters",
                  "static_graph",
                  "zero",
                  "reduce_scatter_bucket",
                  "recompute",
                  "units"});
  Plan plan;
  plan.dialect = ReadChoice<Dialect>(json.At("dialect"), kDialectNames);
  plan.shard_size = json.At("shard_size").AsInt(1, kMaxRanks);
  plan.replicate_size = json.At("replicate_size").AsInt(1, kMaxRanks);
  plan.micro_batch = json.At("micro_batch").AsInt(1, std::int64_t{1} << 24);
  plan.accumulation = json.At("accumulation").AsInt(1, 65535);
  SetChoice(json, "sync", kSyncNames, plan.sync);
  if (const std::optional<JsonValue> offload = json.Find("offload")) {
    plan.offload = ReadOffload(*offload);
  }
  SetChoice(json, "torch", kTorchNames, plan.torch);
  SetChoice(json, "backward_prefetch", kBackwardPrefetchNames, plan.backward_prefetch);
  SetBool(json, "forward_prefetch", plan.forward_prefetch);
  SetBool(json, "limit_all_gathers", plan.limit_all_gathers);
  SetBool(json, "use_orig_params", plan.use_orig_params);
  SetBool(json, "bounded_memory", plan.bounded_memory);
  SetInt(json, "in_flight", 1, 65535, plan.in_flight);
  SetChoice(json, "transfers", kTransfersNames, plan.transfers);
  if (const std::optional<JsonValue> piece = json.Find("moments_piece")) {
    plan.moments_piece = piece->AsBytes();
  }
  if (const std::optional<JsonValue> bucket = json.Find("first_bucket")) {
    plan.first_bucket = bucket->AsBytes();
  }
  if (const std::optional<JsonValue> bucket = json.Find("bucket")) {
    plan.bucket = bucket->AsBytes();
  }
  SetBool(json, "find_unused_parameters", plan.find_unused_parameters);
  SetBool(json, "static_graph", plan.static_graph);
  if (const std::optional<JsonValue> zero = json.Find("zero")) {
    plan.zero = ReadZero(*zero);
  }
  if (const std::optional<JsonValue> bucket = json.Find("reduce_scatter_bucket")) {
    plan.reduce_scatter_bucket = bucket->AsBytes();
  }
  if (const std::optional<JsonValue> recompute = json.Find("recompute")) {
    plan.recompute = ReadRecompute(*recompute);
  }
  plan.units = ReadUnits(json.At("units"));
  return plan;
}

KernelSetOptions ReadKernelSet(const JsonValue& json) {
  json.AllowOnly({"name", "attention", "moe_dispatch", "fused_elementwise", "fused_rope",
                  "fused_norm", "fp32_logits", "loss_chunks", "autocast_weights", "fp8"});
  const JsonValue name = json.At("name");
  KernelSetOptions options = FindKernelSet(name.AsString(), name.path().str());
  SetChoice(json, "attention", kAttentionNames, options.attention);
  SetChoice(json, "moe_dispatch", kMoeDispatchNames, options.moe_dispatch);
  SetBool(json, "fused_elementwise", options.fused_elementwise);
  SetBool(json, "fused_rope", options.fused_rope);
  SetBool(json, "fused_norm", options.fused_norm);
  SetBool(json, "fp32_logits", options.fp32_logits);
  SetInt(json, "loss_chunks", 1, std::int64_t{1} << 20, options.loss_chunks);
  SetBool(json, "autocast_weights", options.autocast_weights);
  SetChoice(json, "fp8", kFp8Names, options.fp8);
  return options;
}

}  // namespace shardwright::internal
