#include "planner/emitters/emission.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_context.h"
#include "models/loader.h"
#include "planner/loss_reasons.h"
#include "schedule/lower/optimizer.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

std::string Text(bool value) {
  return value ? "true" : "false";
}
std::string Text(std::int64_t value) {
  return std::to_string(value);
}
std::string Text(Bytes value) {
  return FormatExact(value);
}

std::string Text(const Reshard& reshard) {
  return reshard.kind == Reshard::Kind::kToGroup ? std::to_string(reshard.group)
                                                 : std::string(NameIn(kReshardNames, reshard.kind));
}

std::string Text(const std::vector<std::string>& list) {
  return list.empty() ? "the dialect's own order" : Listed(list);
}

std::string FirstAndMore(const std::vector<std::string>& names) {
  std::string text = names[0];
  if (names.size() > 1) {
    text += " and " + std::to_string(names.size() - 1) + " more";
  }
  return text;
}

// The choices of a kernel set that differ from those of the set that it is named after.
std::vector<std::string> OwnChoices(const KernelSetOptions& kernels) {
  const KernelSetOptions& named = FindKernelSet(kernels.name, "plan");
  std::vector<std::string> choices;
  if (kernels.attention != named.attention) {
    choices.push_back("attention " + std::string(NameIn(kAttentionNames, kernels.attention)));
  }
  if (kernels.moe_dispatch != named.moe_dispatch) {
    choices.push_back("experts " + std::string(NameIn(kMoeDispatchNames, kernels.moe_dispatch)));
  }
  if (kernels.loss_chunks != named.loss_chunks) {
    choices.push_back("loss in " + std::to_string(kernels.loss_chunks) + " chunks");
  }
  const auto add = [&](const char* name, bool value, bool by_name) {
    if (value != by_name) {
      choices.push_back(std::string(name) + (value ? " on" : " off"));
    }
  };
  add("fused_elementwise", kernels.fused_elementwise, named.fused_elementwise);
  add("fused_rope", kernels.fused_rope, named.fused_rope);
  add("fused_norm", kernels.fused_norm, named.fused_norm);
  add("fp32_logits", kernels.fp32_logits, named.fp32_logits);
  add("autocast_weights", kernels.autocast_weights, named.autocast_weights);
  return choices;
}

// Without what the job freezes and adapts.
void TrainAll(PlanFile& file) {
  Job& job = file.job;
  job.frozen.clear();
  job.lora_targets.clear();
  job.lora_saved.clear();
  job.lora_magnitudes = false;
  job.lora_rank = 0;
  job.lora_alpha = 0.0;
  LoadedModel& loaded = file.model;
  const LoadOptions options = {.sequence_length = job.sequence_length};
  static_cast<Model&>(loaded) =
      loaded.json.empty()
          ? LoadModel(loaded.name, options)
          : ModelFromJson(JsonValue::Parse(loaded.json, loaded.name), loaded.name, options);
  CutForPlan(loaded, file.job, file.plan,
             {"plan: expert_size", "plan: tensor_size", "plan: context_size"});
}

// Why a target runs fields differently: by a beginning of the field's name, longer ones first.
using Reasons = std::map<std::string, std::string, std::greater<>>;

Reasons ReasonsOf(std::string_view target) {
  const EmbeddedFile& file = EmbeddedLossReasons().front();
  static const JsonValue targets = JsonValue::Parse(file.text, std::string(file.path));
  Reasons reasons;
  if (const std::optional<JsonValue> own = targets.Find(target)) {
    for (const std::string& field : own->Keys()) {
      reasons[field] = own->At(field).AsString();
    }
  }
  return reasons;
}

class Differences {
 public:
  Differences(const PlanFile& planned, const PlanFile& emitted, std::string_view target)
      : planned_(planned), emitted_(emitted), reasons_(ReasonsOf(target)) {}

  std::vector<Loss> Find() {
    JobFields();
    PlanFields();
    Recompute();
    DialectFields();
    Units();
    return std::move(losses_);
  }

 private:
  void Add(const std::string& field, const std::string& subject, const std::string& planned,
           const std::string& emitted) {
    Loss loss = {field, subject, planned, emitted, ""};
    const auto reason =
        FindIf(reasons_, [&](const auto& row) { return field.starts_with(row.first); });
    loss.why = reason != reasons_.end() ? reason->second
                                        : "as " + std::string(NameOf(emitted_.plan.dialect)) +
                                              " does it, without a choice";
    losses_.push_back(std::move(loss));
  }

  template <class T>
  void Compare(const std::string& field, const T& planned, const T& emitted) {
    if (!(planned == emitted)) {
      Add(field, "", Text(planned), Text(emitted));
    }
  }

  template <class E>
  void CompareNames(const std::string& field, NameList names, E planned, E emitted) {
    if (planned != emitted) {
      Add(field, "", std::string(NameIn(names, planned)), std::string(NameIn(names, emitted)));
    }
  }

  // How updates run: on the host some dialects leave no choice.
  static OptimizerImpl ImplOf(const PlanFile& file) {
    const Offload& offload = file.plan.offload;
    return offload.parameters || offload.optimizer
               ? OnHost(file.job.optimizer, file.plan.dialect).impl
               : file.job.optimizer.impl;
  }

  void JobFields() {
    const Job& a = planned_.job;
    const Job& b = emitted_.job;
    const NameList dtypes = kTrainingDTypeNames;
    CompareNames("job.precision.master", dtypes, a.precision.master, b.precision.master);
    CompareNames("job.precision.param", dtypes, a.precision.param, b.precision.param);
    CompareNames("job.precision.reduce", dtypes, a.precision.reduce, b.precision.reduce);
    CompareNames("job.optimizer.kind", kOptimizerNames, a.optimizer.kind, b.optimizer.kind);
    if (ImplOf(planned_) != ImplOf(emitted_)) {
      CompareNames("job.optimizer.impl", kOptimizerImplNames, a.optimizer.impl, b.optimizer.impl);
    }
    CompareNames("job.optimizer.states", kStateFormatNames, a.optimizer.states, b.optimizer.states);
    CompareNames("job.frozen_format", kFrozenFormatNames, a.frozen_format, b.frozen_format);
    Compare("job.optimizer.weight_decay", a.optimizer.weight_decay, b.optimizer.weight_decay);
    Compare("job.clip_gradients", a.clip_gradients, b.clip_gradients);
    if (a.allocator != b.allocator) {
      const auto conf = [](const Job& job) {
        const std::string text = AllocatorConf(job.allocator);
        return text.empty() ? std::string("PyTorch's defaults") : text;
      };
      Add("job.allocator", "", conf(a), conf(b));
    }
  }

  void PlanFields() {
    const Plan& a = planned_.plan;
    const Plan& b = emitted_.plan;
    CompareNames("plan.dialect", kDialectNames, a.dialect, b.dialect);
    Compare("plan.shard_size", a.shard_size, b.shard_size);
    Compare("plan.replicate_size", a.replicate_size, b.replicate_size);
    Compare("plan.micro_batch", a.micro_batch, b.micro_batch);
    Compare("plan.accumulation", a.accumulation, b.accumulation);
    // With one micro-batch the modes are the same.
    if (a.accumulation > 1) {
      CompareNames("plan.sync", kSyncNames, a.sync, b.sync);
    }
    Compare("plan.offload.parameters", a.offload.parameters, b.offload.parameters);
    // With the parameters the optimizer goes, whatever is said of it.
    Compare("plan.offload.optimizer", a.offload.optimizer && !a.offload.parameters,
            b.offload.optimizer && !b.offload.parameters);
    Compare("plan.offload.moments", a.offload.moments, b.offload.moments);
    Compare("plan.offload.activations", a.offload.activations, b.offload.activations);
  }

  static std::map<std::string, std::string> RegionsOf(const Plan& plan) {
    std::map<std::string, std::string> regions;
    for (const RecomputeRegion& region : plan.recompute) {
      std::string kind(NameIn(kRecomputeNames, region.kind));
      if (region.kind == RecomputeKind::kSelective) {
        kind += ":" + std::to_string(region.keep_every);
      }
      regions[region.module] = kind;
    }
    return regions;
  }

  void Recompute() {
    const std::map<std::string, std::string> a = RegionsOf(planned_.plan);
    const std::map<std::string, std::string> b = RegionsOf(emitted_.plan);
    std::map<std::pair<std::string, std::string>, std::vector<std::string>> changes;
    for (const auto& [module, kind] : a) {
      const auto other = b.find(module);
      const std::string now = other == b.end() ? "none" : other->second;
      if (now != kind) {
        changes[{kind, now}].push_back(module);
      }
    }
    for (const auto& [module, kind] : b) {
      if (a.count(module) == 0) {
        changes[{"none", kind}].push_back(module);
      }
    }
    for (const auto& [change, modules] : changes) {
      Add("plan.recompute", FirstAndMore(modules), change.first, change.second);
    }
  }

  // Options of the planned dialect; another dialect has none of them.
  void DialectFields() {
    const Plan& a = planned_.plan;
    const Plan& b = emitted_.plan;
    CompareNames("plan.backward_prefetch", kBackwardPrefetchNames, a.backward_prefetch,
                 b.backward_prefetch);
    Compare("plan.forward_prefetch", a.forward_prefetch, b.forward_prefetch);
    Compare("plan.limit_all_gathers", a.limit_all_gathers, b.limit_all_gathers);
    Compare("plan.use_orig_params", a.use_orig_params, b.use_orig_params);
    Compare("plan.bounded_memory", a.bounded_memory, b.bounded_memory);
    Compare("plan.keeps_gathered", a.keeps_gathered, b.keeps_gathered);
    if (a.dialect == Dialect::kNative) {
      Compare("plan.in_flight", a.in_flight, b.in_flight);
      CompareNames("plan.transfers", kTransfersNames, a.transfers, b.transfers);
    }
    if (a.dialect == Dialect::kDdp) {
      Compare("plan.first_bucket", a.first_bucket, b.first_bucket);
      Compare("plan.bucket", a.bucket, b.bucket);
      Compare("plan.find_unused_parameters", a.find_unused_parameters, b.find_unused_parameters);
      Compare("plan.static_graph", a.static_graph, b.static_graph);
    }
    if (IsZero(a.dialect) && IsZero(b.dialect)) {
      ZeroFields(a.zero, b.zero);
      const auto reduction = [](const Plan& plan) {
        return ScattersGradients(plan) ? GradientReduction::kReduceScatter
                                       : GradientReduction::kAllReduce;
      };
      CompareNames("plan.zero.gradient_reduction", kGradientReductionNames, reduction(a),
                   reduction(b));
    }
  }

  void ZeroFields(const ZeroOptions& a, const ZeroOptions& b) {
    Compare("plan.zero.reduce_bucket", a.reduce_bucket, b.reduce_bucket);
    Compare("plan.zero.contiguous_gradients", a.contiguous_gradients, b.contiguous_gradients);
    CompareNames("plan.zero.overlap_comm", kOverlapNames, a.overlap_comm, b.overlap_comm);
    Compare("plan.zero.allgather_bucket", a.allgather_bucket, b.allgather_bucket);
    Compare("plan.zero.before_deepspeed_0_6", a.before_deepspeed_0_6, b.before_deepspeed_0_6);
    Compare("plan.zero.prefetch_bucket", a.prefetch_bucket, b.prefetch_bucket);
    Compare("plan.zero.max_live_parameters", a.max_live_parameters, b.max_live_parameters);
    Compare("plan.zero.max_reuse_distance", a.max_reuse_distance, b.max_reuse_distance);
    Compare("plan.zero.persistence_threshold", a.persistence_threshold, b.persistence_threshold);
    Compare("plan.zero.sub_group", a.sub_group, b.sub_group);
  }

  struct UnitOfParams {
    const UnitPlan* unit = nullptr;
    std::vector<ParamId> params;  // sorted
  };

  // Units that hold parameters.
  static std::vector<UnitOfParams> UnitsOf(const PlanFile& file) {
    const std::vector<ResolvedUnit> resolved = ResolveUnits(file.model, file.plan, "plan");
    std::vector<UnitOfParams> units;
    for (std::size_t u = 0; u < resolved.size(); ++u) {
      if (!resolved[u].params.empty()) {
        units.push_back({&file.plan.units[u], resolved[u].params});
        SortAll(units.back().params);
      }
    }
    return units;
  }

  void Units() {
    const std::vector<UnitOfParams> a = UnitsOf(planned_);
    const std::vector<UnitOfParams> b = UnitsOf(emitted_);
    std::map<std::vector<ParamId>, const UnitPlan*> by_params;
    for (const UnitOfParams& unit : b) {
      by_params[unit.params] = unit.unit;
    }
    std::vector<std::string> gone;
    for (const UnitOfParams& unit : a) {
      const auto other = by_params.find(unit.params);
      if (other == by_params.end()) {
        gone.push_back(unit.unit->name);
      } else {
        CompareUnits(*unit.unit, *other->second);
      }
    }
    if (!gone.empty()) {
      Add("plan.units", FirstAndMore(gone), std::to_string(a.size()) + " units",
          std::to_string(b.size()) + " units, cut differently");
    }
    for (const auto& [change, names] : unit_changes_) {
      Add(change[0], FirstAndMore(names), change[1], change[2]);
    }
  }

  void CompareUnits(const UnitPlan& a, const UnitPlan& b) {
    const auto change = [&](const char* field, const std::string& from, const std::string& to) {
      if (from != to) {
        unit_changes_[{std::string("plan.units.") + field, from, to}].push_back(a.name);
      }
    };
    // Where the emitted dialect has no choice, the dialect itself is the loss.
    const bool is_zero = IsZero(planned_.plan.dialect) || IsZero(emitted_.plan.dialect);
    if (!is_zero) {
      change("reshard", Text(a.reshard), Text(b.reshard));
    }
    change("gap", std::string(NameIn(kGapNames, a.gap)), std::string(NameIn(kGapNames, b.gap)));
    change("full_precision", a.full_precision ? "true" : "false",
           b.full_precision ? "true" : "false");
    change("forward_prefetch", Text(a.forward_prefetch), Text(b.forward_prefetch));
    change("backward_prefetch", Text(a.backward_prefetch), Text(b.backward_prefetch));
  }

  const PlanFile& planned_;
  const PlanFile& emitted_;
  const Reasons reasons_;
  std::vector<Loss> losses_;
  std::map<std::vector<std::string>, std::vector<std::string>> unit_changes_;
};

}  // namespace

void CheckEmittable(const PlanFile& file, const std::string& where, std::string_view target) {
  if (file.plan.expert_size > 1 && target != "torchtitan") {
    throw InputError(where + ": plan.expert_size", std::to_string(file.plan.expert_size),
                     "1, or --to torchtitan, which shares out experts");
  }
  if (file.plan.tensor_size > 1 && target != "torchtitan") {
    throw InputError(where + ": plan.tensor_size", std::to_string(file.plan.tensor_size),
                     "1, or --to torchtitan, which cuts layers");
  }
  // Rings are 0.2's, gathers 0.3's, whose words for stages are not known.
  const bool is_known = file.plan.pipeline_size > 1
                            ? IsRing(file.plan.context_method)
                            : file.plan.context_method != ContextMethod::kUlysses;
  if (file.plan.context_size > 1 && (target != "torchtitan" || !is_known)) {
    throw InputError(
        where + ": plan.context_size", std::to_string(file.plan.context_size),
        "1, or --to torchtitan, which cuts tokens, but not for heads, and beside stages "
        "in a ring alone");
  }
  if (file.plan.pipeline_size > 1 && target != "torchtitan") {
    throw InputError(where + ": plan.pipeline_size", std::to_string(file.plan.pipeline_size),
                     "1, or --to torchtitan, which has stages");
  }
  const MatrixRule rule = file.job.optimizer.matrices;
  if (rule != MatrixRule::kNone) {
    throw InputError(where + ": job.optimizer.matrices",
                     '"' + std::string(NameIn(kMatrixRuleNames, rule)) + '"',
                     "none, since no target's settings name such an optimizer");
  }
  if (file.job.trains_by != TrainsBy::kOwn) {
    throw InputError(where + ": job.trains_by",
                     '"' + std::string(NameIn(kTrainsByNames, file.job.trains_by)) + '"',
                     "own, since no target's settings say what a script compares",
                     "write the file by hand: its batch counts pairs, half of our samples");
  }
  const OptimizerKind kind = file.job.optimizer.kind;
  const bool is_named = target == "trainer" || target == "accelerate" ||
                        (target == "deepspeed" && kind == OptimizerKind::kLion);
  if ((kind == OptimizerKind::kLion || kind == OptimizerKind::kAdafactor) && !is_named) {
    throw InputError(
        where + ": job.optimizer.kind", '"' + std::string(NameIn(kOptimizerNames, kind)) + '"',
        "another one, or --to accelerate or trainer, whose script names the optimizer");
  }
  const bool is_script =
      target == "trainer" || (target == "accelerate" && IsTorch(file.plan.dialect));
  if (file.job.frozen_format != FrozenFormat::kMaster && !is_script) {
    throw InputError(where + ": job.frozen_format",
                     '"' + std::string(NameIn(kFrozenFormatNames, file.job.frozen_format)) + '"',
                     "master, or target accelerate or trainer, whose script loads the weights");
  }
  if (!file.job.fp32_masters.empty()) {
    throw InputError(where + ": job.fp32_masters", Quoted(file.job.fp32_masters.front()),
                     "none, since no target's settings say which parameters are upcast");
  }
  const std::string_view states = NameIn(kStateFormatNames, file.job.optimizer.states);
  if (file.job.optimizer.states != StateFormat::kMaster && !is_script) {
    throw InputError(where + ": job.optimizer.states", '"' + std::string(states) + '"',
                     "master, or target accelerate or trainer, whose script names the optimizer");
  }
}

void AddTorchDuties(const PlanFile& file, Emission& emission) {
  if (file.plan.torch != Plan().torch) {
    emission.by_hand.push_back("run it with PyTorch " +
                               std::string(NameIn(kTorchNames, file.plan.torch)) +
                               ", whose rules the plan follows");
  }
  const std::string allocator = AllocatorConf(file.job.allocator);
  if (!allocator.empty() && !emission.has_allocator) {
    emission.by_hand.push_back("export PYTORCH_ALLOC_CONF=" + allocator +
                               " (before PyTorch 2.9: PYTORCH_CUDA_ALLOC_CONF)");
  }
  const Offload& offload = file.plan.offload;
  if ((offload.parameters || offload.optimizer || offload.activations) &&
      file.plan.dialect != Dialect::kNative && file.job.allocator.pinned_max_round_mib == 0) {
    emission.by_hand.emplace_back(
        "keep host memory free for page-locked blocks, which PyTorch rounds up to powers of two; "
        "from PyTorch 2.13 on --allocator pinned_max_round_threshold_mb:1 says not to");
  }
  if (file.job.allocator.garbage_collection_threshold > 0) {
    emission.by_hand.emplace_back(
        "call torch.cuda.set_per_process_memory_fraction: without it PyTorch ignores "
        "garbage_collection_threshold");
  }
}

void AddKernelDuties(const PlanFile& file, Emission& emission) {
  if (file.kernels.attention == AttentionImpl::kCudnn) {
    emission.by_hand.emplace_back(
        "run the model inside torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)");
  } else if (file.kernels.attention == AttentionImpl::kFlash3) {
    emission.by_hand.emplace_back(
        "make attention call FlashAttention-3 (transformers: "
        "attn_implementation=\"flash_attention_3\")");
  } else if (file.kernels.attention == AttentionImpl::kCk) {
    emission.by_hand.emplace_back(
        "call torch.backends.cuda.preferred_rocm_fa_library(\"ck\") before the model runs");
  }
  if (file.kernels.fp8 != Fp8Products::kNone) {
    const bool by_row = file.kernels.fp8 == Fp8Products::kPerRow;
    emission.by_hand.push_back(
        std::string("convert the linear layers of the blocks, all but the vocabulary's, before the "
                    "plan is applied: torchtitan by its float8 model converter, else "
                    "torchao.float8.convert_to_float8_training with "
                    "Float8LinearConfig.from_recipe_name(\"") +
        (by_row ? "rowwise" : "tensorwise") + "\")" +
        (GathersFp8(file.kernels.fp8) ? " and enable_fsdp_float8_all_gather" : "") +
        (file.kernels.fp8 == Fp8Products::kPrecomputed
             ? ", and call precompute_float8_dynamic_scale_for_fsdp behind each update"
             : ""));
  }
  if (file.kernels.fused_elementwise && !emission.has_compile) {
    emission.by_hand.emplace_back(
        "compile each block before the model is wrapped: block.compile()");
  }
  if (file.kernels.loss_chunks > 1 && !emission.has_loss_chunks) {
    emission.by_hand.push_back("run head and loss in " + std::to_string(file.kernels.loss_chunks) +
                               " chunks, so that the logits never exist as a whole: with "
                               "liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss, or a "
                               "model that Liger patches");
  }
  const std::vector<std::string> choices = OwnChoices(file.kernels);
  const bool is_usual = file.kernels.name == "torch-eager" || file.kernels.name == "torch-compile";
  if (!is_usual || !choices.empty()) {
    emission.by_hand.push_back("run the kernels that the prediction is of: " + file.kernels.name +
                               (choices.empty() ? "" : " with " + Listed(choices)) +
                               " (docs/kernel_sets.md)");
  }
}

void AddJobDuties(const PlanFile& file, bool has_own_model, Emission& emission) {
  const Job& job = file.job;
  if (file.model.sequence_length > 0 && !emission.has_sequence) {
    emission.by_hand.push_back("feed samples of " + std::to_string(job.sequence_length) +
                               " tokens");
  }
  if (job.mode == JobMode::kForward) {
    emission.by_hand.emplace_back("run forward passes alone, under torch.no_grad()");
  }
  const std::string frozen = Listed(job.frozen, Quoted);
  const std::string adapters =
      "rank " + std::to_string(job.lora_rank) + ", alpha " +
      Fixed(job.lora_alpha == 0.0 ? static_cast<double>(job.lora_rank) : job.lora_alpha, "%g") +
      (job.lora_dropout > 0.0 ? ", dropout " + Fixed(job.lora_dropout, "%g") : "") + ", on " +
      Listed(job.lora_targets, Quoted) +
      (job.lora_saved.empty() ? "" : ", modules_to_save " + Listed(job.lora_saved, Quoted)) +
      (job.lora_magnitudes ? ", use_dora" : "");
  if (emission.as_emitted.job.frozen_format != FrozenFormat::kMaster) {
    emission.by_hand.push_back(
        job.frozen_format == FrozenFormat::kParam
            ? "load the frozen weights in their 16-bit dtype"
            : "load the frozen weights in the format " +
                  std::string(NameIn(kFrozenFormatNames, job.frozen_format)) +
                  " (transformers: BitsAndBytesConfig)" +
                  (job.quantized_experts
                       ? ", the experts' tensors, too (axolotl: quantize_moe_experts)"
                       : ""));
  }
  const char* kWhy = "the framework builds the model, and its settings do not say it";
  if (!frozen.empty() && !has_own_model) {
    emission.by_hand.push_back("freeze the parameters " + frozen + " before the model is wrapped");
  } else if (!frozen.empty()) {
    emission.losses.push_back({"job.frozen", "", frozen, "all are trained", kWhy});
  }
  if (job.lora_rank > 0 && !has_own_model) {
    emission.by_hand.push_back("give the model LoRA adapters of " + adapters +
                               " (peft: LoraConfig) before it is wrapped");
  } else if (job.lora_rank > 0) {
    emission.losses.push_back({"job.lora_rank", "", adapters, "all is trained", kWhy});
  }
  if (has_own_model && (!frozen.empty() || job.lora_rank > 0)) {
    TrainAll(emission.as_emitted);
  }
}

std::vector<Loss> FindLosses(const PlanFile& planned, const PlanFile& emitted,
                             std::string_view target) {
  return Differences(planned, emitted, target).Find();
}

Plan WithDialect(const Plan& plan, Dialect dialect) {
  Plan out;
  out.dialect = dialect;
  out.shard_size = plan.shard_size;
  out.replicate_size = plan.replicate_size;
  out.micro_batch = plan.micro_batch;
  out.accumulation = plan.accumulation;
  out.sync = plan.sync;
  out.recompute = plan.recompute;
  out.offload = plan.offload;
  // The optimizer alone goes to the host in native, and in zero3, whose settings say so.
  out.offload.optimizer = out.offload.moments = false;
  if (IsTorch(plan.dialect) && IsTorch(dialect)) {
    out.torch = plan.torch;
  }
  return out;
}

std::string LongNameOf(DType dtype) {
  return dtype == DType::kFp32 ? "float32" : dtype == DType::kBf16 ? "bfloat16" : "float16";
}

}  // namespace shardwright
