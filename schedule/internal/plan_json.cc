#include "schedule/internal/plan_json.h"

#include <string>
#include <type_traits>
#include <utility>

#include <nlohmann/json.hpp>

#include "core/ranges.h"
#include "core/text.h"
#include "schedule/plan_names.h"

namespace shardwright::internal {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::int64_t kMaxRanks = std::int64_t{1} << 24;
constexpr std::int64_t kMaxAccumulation = 65535;

// What may stand in a field. A file may leave out what is not needed: the default holds then.
struct Rule {
  NameList names = {};                       // of an enumerator
  std::int64_t least = 0;                    // of an integer
  std::int64_t most = JsonValue::kMaxCount;  // likewise
  bool (*holds)(double number) = nullptr;    // of a number with a fraction
  const char* expected = "";                 // what an error says where that is false
  bool is_needed = false;
  bool is_written = true;
};

bool IsFraction(double number) {
  return number >= 0.0 && number < 1.0;
}
constexpr Rule kRanks = {.least = 1, .most = kMaxRanks, .is_needed = true};
constexpr Rule kFraction = {.holds = IsFraction, .expected = "a fraction in [0, 1)"};

// The fields of each part of a file, in its order, named once for reading and writing:
// fields(part, visit) calls visit(key, member, rule), or visit(key, part, its fields).
constexpr auto kPrecisionFields = [](auto& precision, auto& visit) {
  visit("master", precision.master, {.names = kTrainingDTypeNames});
  visit("param", precision.param, {.names = kTrainingDTypeNames});
  visit("reduce", precision.reduce, {.names = kTrainingDTypeNames});
};
constexpr auto kOptimizerFields = [](auto& optimizer, auto& visit) {
  visit("kind", optimizer.kind, {.names = kOptimizerNames});
  visit("impl", optimizer.impl, {.names = kOptimizerImplNames});
  visit("weight_decay", optimizer.weight_decay);
  visit("matrices", optimizer.matrices,
        {.names = kMatrixRuleNames, .is_written = optimizer.matrices != MatrixRule::kNone});
  visit("states", optimizer.states,
        {.names = kStateFormatNames, .is_written = optimizer.states != StateFormat::kMaster});
};
constexpr auto kAllocatorFields = [](auto& allocator, auto& visit) {
  visit("expandable_segments", allocator.expandable_segments);
  visit("max_split_size", allocator.max_split_size);
  visit("garbage_collection_threshold", allocator.garbage_collection_threshold);
  visit("pinned_max_round_mib", allocator.pinned_max_round_mib,
        {.most = 1 << 20, .is_written = allocator.pinned_max_round_mib > 0});
};
constexpr auto kRolloutFields = [](auto& rollout, auto& visit) {
  visit("completion", rollout.completion, {.most = std::int64_t{1} << 30});
  visit("generations", rollout.generations, {.least = 2, .most = kMaxAccumulation});
  visit("updates", rollout.updates, {.least = 1, .most = kMaxAccumulation});
  visit("batches", rollout.batches, {.most = kMaxAccumulation});
  visit("has_old", rollout.has_old);
  visit("has_reference", rollout.has_reference);
  visit("engine", rollout.engine, kFraction);
  visit("sleeps", rollout.sleeps);
  visit("by_trainer", rollout.by_trainer);
  visit("seconds", rollout.seconds,
        {.holds = [](double s) { return s >= 0 && s <= kMaxGeneration; },
         .expected = "seconds, at most 1e6"});
};
constexpr auto kJobFields = [](auto& job, auto& visit) {
  visit("mode", job.mode, {.names = kJobModeNames});
  visit("sequence_length", job.sequence_length,
        {.least = 1, .most = std::int64_t{1} << 30, .is_needed = true});
  visit("global_batch", job.global_batch, {.most = std::int64_t{1} << 40});
  visit("precision", job.precision, kPrecisionFields);
  visit("optimizer", job.optimizer, kOptimizerFields);
  visit("clip_gradients", job.clip_gradients);
  visit("frozen", job.frozen);
  visit("lora_rank", job.lora_rank, {.most = 1 << 20});
  visit("lora_alpha", job.lora_alpha,
        {.holds = [](double alpha) { return alpha > 0.0 && alpha <= kMaxLoraAlpha; },
         .expected = "a number above 0, at most 1e6",
         .is_written = job.lora_alpha != 0.0});
  visit("lora_targets", job.lora_targets);
  visit(
      "lora_dropout", job.lora_dropout,
      {.holds = IsFraction, .expected = kFraction.expected, .is_written = job.lora_dropout > 0.0});
  visit("lora_saved", job.lora_saved, {.is_written = !job.lora_saved.empty()});
  visit("lora_magnitudes", job.lora_magnitudes, {.is_written = job.lora_magnitudes});
  visit("trains_by", job.trains_by,
        {.names = kTrainsByNames, .is_written = job.trains_by != TrainsBy::kOwn});
  visit("rollout", job.rollout, kRolloutFields, job.trains_by == TrainsBy::kGrpo);
  visit("frozen_format", job.frozen_format,
        {.names = kFrozenFormatNames, .is_written = job.frozen_format != FrozenFormat::kMaster});
  visit("quantized_experts", job.quantized_experts, {.is_written = job.quantized_experts});
  visit("memory_margin", job.memory_margin, kFraction);
  visit("allocator", job.allocator, kAllocatorFields, job.allocator != AllocatorSettings());
};
constexpr auto kOffloadFields = [](auto& offload, auto& visit) {
  visit("parameters", offload.parameters);
  visit("optimizer", offload.optimizer);
  visit("activations", offload.activations);
  visit("moments", offload.moments);
};
constexpr auto kZeroFields = [](auto& zero, auto& visit) {
  visit("reduce_bucket", zero.reduce_bucket, {.least = 1});
  visit("contiguous_gradients", zero.contiguous_gradients);
  visit("overlap_comm", zero.overlap_comm, {.names = kOverlapNames});
  visit("gradient_reduction", zero.gradient_reduction, {.names = kGradientReductionNames});
  visit("allgather_bucket", zero.allgather_bucket);
  visit("before_deepspeed_0_6", zero.before_deepspeed_0_6);
  visit("prefetch_bucket", zero.prefetch_bucket);
  visit("max_live_parameters", zero.max_live_parameters);
  visit("max_reuse_distance", zero.max_reuse_distance);
  visit("persistence_threshold", zero.persistence_threshold);
  visit("sub_group", zero.sub_group, {.least = 1});
};
constexpr auto kRegionFields = [](auto& region, auto& visit) {
  visit("module", region.module, {.is_needed = true});
  visit("kind", region.kind, {.names = kRecomputeNames});
  visit("keep_every", region.keep_every, {.least = 1});
};
constexpr auto kUnitFields = [](auto& unit, auto& visit) {
  visit("name", unit.name);
  visit("modules", unit.modules, {.is_needed = true});
  visit("reshard", unit.reshard, {.names = kReshardNames});
  visit("gap", unit.gap, {.names = kGapNames});
  visit("full_precision", unit.full_precision, {.is_written = unit.full_precision});
  visit("forward_prefetch", unit.forward_prefetch);
  visit("backward_prefetch", unit.backward_prefetch);
};
constexpr auto kPlanFields = [](auto& plan, auto& visit) {
  visit("dialect", plan.dialect, {.names = kDialectNames, .is_needed = true});
  visit("shard_size", plan.shard_size, kRanks);
  visit("replicate_size", plan.replicate_size, kRanks);
  visit("expert_size", plan.expert_size,
        {.least = 1, .most = kMaxRanks, .is_written = plan.expert_size > 1});
  visit("tensor_size", plan.tensor_size,
        {.least = 1, .most = kMaxRanks, .is_written = plan.tensor_size > 1});
  visit("tensor_async", plan.tensor_async, {.is_written = plan.tensor_async});
  visit("context_size", plan.context_size,
        {.least = 1, .most = kMaxRanks, .is_written = plan.context_size > 1});
  visit(
      "context_method", plan.context_method,
      {.names = kContextMethodNames, .is_written = plan.context_method != ContextMethod::kGather});
  visit("pipeline_size", plan.pipeline_size,
        {.least = 1, .most = kMaxRanks, .is_written = plan.pipeline_size > 1});
  visit("pipeline_stages", plan.pipeline_stages,
        {.least = 1, .most = kMaxRanks, .is_written = plan.pipeline_stages > 1});
  visit("pipeline_edge_layers", plan.pipeline_edge_layers,
        {.least = 0, .most = 1, .is_written = plan.pipeline_edge_layers != 1});
  visit("pipeline_schedule", plan.pipeline_schedule,
        {.names = kPipelineScheduleNames, .is_written = plan.pipeline_size > 1});
  visit("micro_batch", plan.micro_batch, {.least = 1, .most = 1 << 24, .is_needed = true});
  visit("accumulation", plan.accumulation,
        {.least = 1, .most = kMaxAccumulation, .is_needed = true});
  visit("sync", plan.sync, {.names = kSyncNames});
  visit("offload", plan.offload, kOffloadFields);
  visit("torch", plan.torch, {.names = kTorchNames, .is_written = IsTorch(plan.dialect)});
  visit("keeps_gathered", plan.keeps_gathered, {.is_written = plan.keeps_gathered});
  visit("backward_prefetch", plan.backward_prefetch, {.names = kBackwardPrefetchNames});
  visit("forward_prefetch", plan.forward_prefetch);
  visit("limit_all_gathers", plan.limit_all_gathers);
  visit("use_orig_params", plan.use_orig_params);
  visit("bounded_memory", plan.bounded_memory);
  visit("in_flight", plan.in_flight, {.least = 1, .most = kMaxAccumulation});
  visit("transfers", plan.transfers, {.names = kTransfersNames});
  visit("moments_piece", plan.moments_piece);
  visit("first_bucket", plan.first_bucket);
  visit("bucket", plan.bucket);
  visit("find_unused_parameters", plan.find_unused_parameters);
  visit("static_graph", plan.static_graph);
  visit("zero", plan.zero, kZeroFields);
  Bytes retired;  // an option of the dialect fairscale, which earlier files of all dialects have
  visit("reduce_scatter_bucket", retired, {.is_written = false});
  visit("recompute", plan.recompute);
  visit("units", plan.units, {.is_needed = true});
};
constexpr auto kKernelSetFields = [](auto& kernels, auto& visit) {
  visit("name", kernels.name, {.is_needed = true});
  visit("attention", kernels.attention, {.names = kAttentionNames});
  visit("moe_dispatch", kernels.moe_dispatch, {.names = kMoeDispatchNames});
  visit("fused_elementwise", kernels.fused_elementwise);
  visit("fused_rope", kernels.fused_rope);
  visit("fused_norm", kernels.fused_norm);
  visit("fp32_logits", kernels.fp32_logits);
  visit("loss_chunks", kernels.loss_chunks, {.least = 1, .most = 1 << 20});
  visit("autocast_weights", kernels.autocast_weights);
  visit("fp8", kernels.fp8, {.names = kFp8Names, .is_written = kernels.fp8 != Fp8Products::kNone});
};

struct KeyList {
  std::vector<std::string> keys;

  template <class T>
  void operator()(const char* key, const T& /*value*/, const Rule& /*rule*/ = {}) {
    keys.emplace_back(key);
  }
  template <class Part, class Fields>
  void operator()(const char* key, const Part& /*part*/, Fields /*fields*/, bool = true) {
    keys.emplace_back(key);
  }
};

template <class Part, class Fields>
void ReadPart(const JsonValue& json, Fields fields, Part& part);

// The elements of a list, each read by `read`.
template <class T, class ReadOne>
std::vector<T> ReadList(const JsonValue& json, const char* expected, ReadOne read) {
  if (!json.IsArray()) {
    throw json.Error(expected);
  }
  std::vector<T> list;
  for (std::size_t i = 0; i < json.size(); ++i) {
    list.push_back(read(json[i]));
  }
  return list;
}

double ReadNumber(const JsonValue& json, const Rule& rule) {
  const double number = json.AsDouble();
  if (rule.holds != nullptr && !rule.holds(number)) {
    throw json.Error(rule.expected);
  }
  return number;
}

Reshard ReadReshard(const JsonValue& json, const Rule& rule) {
  if (json.IsNumber()) {
    return {Reshard::Kind::kToGroup, json.AsInt(1, kMaxRanks)};
  }
  if (!json.IsString()) {
    throw json.Error("\"always\", \"never\" or a number of ranks");
  }
  return {static_cast<Reshard::Kind>(json.AsChoice(rule.names)), 0};
}

template <class T>
T ReadValue(const JsonValue& json, const Rule& rule) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<T>(json.AsChoice(rule.names));
  } else if constexpr (std::is_same_v<T, bool>) {
    return json.AsBool();
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(json.AsInt(rule.least, rule.most));
  } else if constexpr (std::is_same_v<T, double>) {
    return ReadNumber(json, rule);
  } else if constexpr (std::is_same_v<T, Bytes>) {
    return json.AsBytes();
  } else if constexpr (std::is_same_v<T, std::string>) {
    return json.AsString();
  } else if constexpr (std::is_same_v<T, Reshard>) {
    return ReadReshard(json, rule);
  } else if constexpr (std::is_same_v<T, std::vector<UnitPlan>>) {
    return ReadUnits(json);
  } else if constexpr (std::is_same_v<T, std::vector<RecomputeRegion>>) {
    return ReadList<RecomputeRegion>(json, "a list of recompute regions", [](const JsonValue& one) {
      RecomputeRegion region;
      ReadPart(one, kRegionFields, region);
      return region;
    });
  } else {
    return ReadList<std::string>(json, "a list of strings",
                                 [](const JsonValue& one) { return one.AsString(); });
  }
}

struct Reader {
  const JsonValue& json;

  template <class T>
  void operator()(const char* key, T& value, const Rule& rule = {}) {
    if (const auto found = rule.is_needed ? json.At(key) : json.Find(key)) {
      value = ReadValue<T>(*found, rule);
    }
  }
  template <class Part, class Fields>
  void operator()(const char* key, Part& part, Fields fields, bool /*is_written*/ = true) {
    if (const auto found = json.Find(key)) {
      ReadPart(*found, fields, part);
    }
  }
};

// No other keys may stand there.
template <class Part, class Fields>
void ReadPart(const JsonValue& json, Fields fields, Part& part) {
  KeyList known;
  fields(part, known);
  json.AllowOnly(known.keys);
  Reader reader{json};
  fields(part, reader);
}

template <class Part, class Fields>
Json PartJson(const Part& part, Fields fields);

struct Writer {
  Json json;

  template <class T>
  void operator()(const char* key, const T& value, const Rule& rule = {}) {
    if (!rule.is_written) {
      return;
    }
    if constexpr (std::is_enum_v<T>) {
      json[key] = NameIn(rule.names, value);
    } else if constexpr (std::is_same_v<T, Bytes>) {
      json[key] = FormatExact(value);
    } else if constexpr (std::is_same_v<T, Reshard>) {
      json[key] = value.kind == Reshard::Kind::kToGroup ? Json(value.group)
                                                        : Json(NameIn(rule.names, value.kind));
    } else if constexpr (std::is_same_v<T, std::vector<UnitPlan>>) {
      AddList(key, value, kUnitFields);
    } else if constexpr (std::is_same_v<T, std::vector<RecomputeRegion>>) {
      AddList(key, value, kRegionFields);
    } else {
      json[key] = value;
    }
  }
  template <class Part, class Fields>
  void operator()(const char* key, const Part& part, Fields fields, bool is_written = true) {
    if (is_written) {
      json[key] = PartJson(part, fields);
    }
  }
  template <class Part, class Fields>
  void AddList(const char* key, const std::vector<Part>& parts, Fields fields) {
    json[key] = Mapped<Json>(parts, [&](const Part& part) { return PartJson(part, fields); });
  }
};

template <class Part, class Fields>
Json PartJson(const Part& part, Fields fields) {
  Writer writer;
  fields(part, writer);
  return std::move(writer.json);
}

std::string DefaultUnitName(const std::vector<std::string>& modules) {
  return modules == std::vector<std::string>{""} ? "root" : Listed(modules, {}, "+");
}

}  // namespace

std::vector<UnitPlan> ReadUnits(const JsonValue& json) {
  return ReadList<UnitPlan>(json, "a list of units", [](const JsonValue& one) {
    UnitPlan unit;
    ReadPart(one, kUnitFields, unit);
    unit.name = one.Find("name") ? unit.name : DefaultUnitName(unit.modules);
    return unit;
  });
}

Job ReadJob(const JsonValue& json) {
  Job job;
  ReadPart(json, kJobFields, job);
  return job;
}

Plan ReadPlan(const JsonValue& json) {
  Plan plan;
  ReadPart(json, kPlanFields, plan);
  return plan;
}

KernelSetOptions ReadKernelSet(const JsonValue& json) {
  KernelSetOptions options;
  KeyList known;
  kKernelSetFields(options, known);
  json.AllowOnly(known.keys);
  const JsonValue name = json.At("name");
  options = FindKernelSet(name.AsString(), name.path().str());
  ReadPart(json, kKernelSetFields, options);
  return options;
}

Json JobJson(const Job& job) {
  return PartJson(job, kJobFields);
}

Json PlanJson(const Plan& plan) {
  return PartJson(plan, kPlanFields);
}

Json KernelSetJson(const KernelSetOptions& kernels) {
  return PartJson(kernels, kKernelSetFields);
}

}  // namespace shardwright::internal
