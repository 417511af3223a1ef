#include "planner/emitters/trainer.h"

#include <algorithm>

#include "core/error.h"
#include "core/text.h"
#include "planner/emitters/emitters.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/lower/optimizer.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// The plan knows whether weights decay, not how much.
constexpr double kSomeWeightDecay = 0.01;

std::string OptimName(const OptimizerSpec& optimizer) {
  if (optimizer.kind == OptimizerKind::kSgd || optimizer.kind == OptimizerKind::kMomentum) {
    return "sgd";
  }
  if (optimizer.kind == OptimizerKind::kLion && optimizer.states == StateFormat::kMaster) {
    return "lion_32bit";
  }
  if (const std::string_view word = WordOf(optimizer); !word.empty() && word != "adamw_hf") {
    return std::string(word);
  }
  return optimizer.impl == OptimizerImpl::kFused ? "adamw_torch_fused" : "adamw_torch";
}

void SetFsdpKeys(const HfFsdp& fsdp, TrainerSettings& s) {
  s.fsdp = true;
  s.version = fsdp.version;
  if (fsdp.min_num_params > 0) {
    s.auto_wrap_policy = "SIZE_BASED_WRAP";
    s.min_num_params = fsdp.min_num_params;
  } else if (fsdp.layer_classes.empty()) {
    s.auto_wrap_policy = "NO_WRAP";
  } else {
    s.auto_wrap_policy = "TRANSFORMER_BASED_WRAP";
    s.transformer_layer_cls_to_wrap = fsdp.layer_classes;
  }
  s.cpu_offload = fsdp.cpu_offload;
  s.activation_checkpointing = fsdp.activation_checkpointing;
  s.state_dict_type = "SHARDED_STATE_DICT";
  if (fsdp.version == 2) {
    s.reshard_after_forward = fsdp.reshard_after_forward;
    return;
  }
  s.sharding_strategy = LowerCase(ShardingStrategyName(fsdp));
  s.backward_prefetch = LowerCase(BackwardPrefetchName(fsdp.backward_prefetch));
  s.forward_prefetch = fsdp.forward_prefetch;
  s.use_orig_params = fsdp.use_orig_params;
  s.limit_all_gathers = fsdp.limit_all_gathers;
}

// Batch, precision and optimizer, which every backend takes from TrainingArguments.
TrainerSettings CommonSettings(const PlanFile& file) {
  const Plan& plan = file.plan;
  TrainerSettings s;
  s.output_dir = "output";
  s.per_device_train_batch_size = plan.micro_batch;
  s.gradient_accumulation_steps = plan.accumulation;
  s.optim = OptimName(file.job.optimizer);
  s.weight_decay = file.job.optimizer.weight_decay ? kSomeWeightDecay : 0.0;
  s.max_grad_norm = file.job.clip_gradients ? 1.0 : 0.0;
  if (plan.accumulation > 1 && !IsZero(plan.dialect)) {
    s.sync_each_batch = plan.sync != SyncMode::kLast;
  }
  if (file.kernels.loss_chunks > 1) {
    s.use_liger_kernel = true;
  }
  if (file.kernels.fused_elementwise) {
    s.torch_compile = true;
  }
  return s;
}

void SetMixedPrecision(const std::string& name, TrainerSettings& s) {
  if (name == "bf16") {
    s.bf16 = true;
  } else if (name == "fp16") {
    s.fp16 = true;
  }
}

void ReadVersion1(const TrainerSettings& s, const std::string& where, HfFsdp& fsdp) {
  const std::string strategy = LowerCase(s.sharding_strategy.value_or("full_shard"));
  if (strategy != "full_shard" && strategy != "shard_grad_op" && strategy != "no_shard" &&
      strategy != "hybrid_shard" && strategy != "hybrid_shard_zero2") {
    RefuseSetting(where, "fsdp_config.reshard_after_forward", strategy,
                  "full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2");
  }
  fsdp.is_hybrid = strategy.starts_with("hybrid");
  fsdp.no_shard = strategy == "no_shard";
  fsdp.reshard_after_forward = strategy != "shard_grad_op" && strategy != "hybrid_shard_zero2";
  const std::string prefetch = LowerCase(s.backward_prefetch.value_or("no_prefetch"));
  if (prefetch != "backward_pre" && prefetch != "backward_post" && prefetch != "no_prefetch") {
    RefuseSetting(where, "fsdp_config.backward_prefetch", prefetch,
                  "backward_pre, backward_post or no_prefetch");
  }
  fsdp.backward_prefetch = prefetch == "backward_pre"    ? BackwardPrefetch::kPre
                           : prefetch == "backward_post" ? BackwardPrefetch::kPost
                                                         : BackwardPrefetch::kNone;
  fsdp.forward_prefetch = s.forward_prefetch.value_or(false);
  fsdp.use_orig_params = s.use_orig_params.value_or(true);
  fsdp.limit_all_gathers = s.limit_all_gathers.value_or(true);
}

}  // namespace

TrainerSettings ToTrainer(const HfFsdp& fsdp, const PlanFile& file) {
  TrainerSettings s = CommonSettings(file);
  SetMixedPrecision(fsdp.mixed_precision, s);
  SetFsdpKeys(fsdp, s);
  return s;
}

HfFsdp FromTrainer(const TrainerSettings& settings, const std::string& where) {
  HfFsdp fsdp;
  fsdp.version = settings.version.value_or(2);
  if (fsdp.version != 1 && fsdp.version != 2) {
    RefuseSetting(where, "fsdp_config.version", std::to_string(fsdp.version), "1 or 2");
  }
  fsdp.mixed_precision = settings.bf16.value_or(false)   ? "bf16"
                         : settings.fp16.value_or(false) ? "fp16"
                                                         : "no";
  const std::string policy = settings.auto_wrap_policy.value_or("TRANSFORMER_BASED_WRAP");
  if (policy == "TRANSFORMER_BASED_WRAP") {
    fsdp.has_layers_of_model = !settings.transformer_layer_cls_to_wrap.has_value();
    fsdp.layer_classes =
        settings.transformer_layer_cls_to_wrap.value_or(std::vector<std::string>());
  } else if (policy == "SIZE_BASED_WRAP") {
    fsdp.min_num_params = settings.min_num_params.value_or(0);
  } else if (policy != "NO_WRAP") {
    RefuseSetting(where, "fsdp_config.auto_wrap_policy", policy,
                  "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP");
  }
  fsdp.cpu_offload = settings.cpu_offload.value_or(false);
  fsdp.activation_checkpointing = settings.activation_checkpointing.value_or(false);
  if (fsdp.version == 1) {
    ReadVersion1(settings, where, fsdp);
  } else {
    fsdp.reshard_after_forward = settings.reshard_after_forward.value_or(true);
  }
  return fsdp;
}

void ApplyTrainerOptimizer(const TrainerSettings& settings, Job& job) {
  const std::string optim = settings.optim.value_or("adamw_torch_fused");
  const OptimizerSpec named = OptimizerNamed(optim).value_or(OptimizerSpec());
  job.optimizer.kind = named.kind;
  job.optimizer.impl = named.impl;
  job.optimizer.states = named.states;
  job.optimizer.weight_decay = settings.weight_decay.value_or(0.0) > 0.0;
}

void ApplyTrainer(const TrainerSettings& settings, PlanFile& file) {
  Plan& plan = file.plan;
  Job& job = file.job;
  plan.micro_batch = settings.per_device_train_batch_size.value_or(8);
  plan.accumulation = settings.gradient_accumulation_steps.value_or(1);
  job.global_batch = MeshOf(plan).DataCount() * plan.micro_batch * plan.accumulation;
  plan.sync = settings.sync_each_batch.value_or(false) || plan.accumulation == 1 ? SyncMode::kEvery
                                                                                 : SyncMode::kLast;
  if (plan.dialect == Dialect::kDdp) {
    // create_accelerator of trainer.py: a model with PEFT's adapters is no PreTrainedModel.
    plan.find_unused_parameters = settings.find_unused_parameters.value_or(
        job.lora_rank > 0 || !settings.gradient_checkpointing.value_or(false));
    plan.static_graph = settings.static_graph.value_or(false);
    if (settings.bucket_cap_mb) {
      plan.bucket = *settings.bucket_cap_mb * kMiB;
      plan.first_bucket = plan.bucket;
    }
  }
  ApplyTrainerOptimizer(settings, job);
  job.clip_gradients = settings.max_grad_norm.value_or(1.0) > 0.0;
}

Emission EmitTrainer(const PlanFile& file, const EmitOptions& options) {
  Emission emission;
  emission.as_emitted = file;
  const HfFsdp fsdp = HfFsdpOf(file);
  TrainerSettings settings;
  const bool is_zero = IsZero(file.plan.dialect);
  if (is_zero) {
    emission = EmitDeepSpeed(file, options);
    settings = CommonSettings(file);
    SetMixedPrecision(fsdp.mixed_precision, settings);
    settings.deepspeed = emission.files[0].name;
  } else if (file.plan.dialect == Dialect::kDdp) {
    settings = CommonSettings(file);
    SetMixedPrecision(fsdp.mixed_precision, settings);
    ApplyHfDdp(fsdp.mixed_precision, emission.as_emitted);
    settings.find_unused_parameters = file.plan.find_unused_parameters;
    settings.static_graph = file.plan.static_graph;
    if (const Plan defaults;
        file.plan.bucket != defaults.bucket || file.plan.first_bucket != defaults.first_bucket) {
      settings.bucket_cap_mb =
          std::max<std::int64_t>(1, (file.plan.bucket.value + kMiB.value / 2) / kMiB.value);
    }
    settings.gradient_checkpointing = RecomputesEveryBlock(file.model, file.plan);
    if (!*settings.gradient_checkpointing) {
      emission.as_emitted.plan.recompute.clear();
    }
  } else {
    HfFsdp mesh_free = fsdp;
    mesh_free.dp_replicate = 1;
    mesh_free.dp_shard = 0;
    mesh_free.activation_checkpointing_offload = false;
    ApplyHfFsdp(mesh_free, emission.as_emitted);
    settings = ToTrainer(mesh_free, file);
  }
  if (!is_zero) {
    ApplyTrainer(settings, emission.as_emitted);
    emission.losses = FindLosses(file, emission.as_emitted, "trainer");
  }
  emission.has_compile = settings.torch_compile.has_value();
  emission.has_loss_chunks = settings.use_liger_kernel.has_value();
  if (file.job.optimizer.weight_decay) {
    emission.by_hand.emplace_back(
        "set the learning rate and the weight decay (0.01 stands for any)");
  } else {
    emission.by_hand.emplace_back("set the learning rate");
  }
  const Precision& precision = file.job.precision;
  if (precision.param == precision.master && precision.param != DType::kFp32 && !is_zero) {
    emission.by_hand.emplace_back("load the model in its 16-bit dtype");
  }
  emission.by_hand.push_back("start it with: torchrun --nnodes " +
                             std::to_string(file.cluster.node_count) + " --nproc-per-node " +
                             std::to_string(file.cluster.gpus_per_node) + " " + options.script);
  emission.files.insert(emission.files.begin(),
                        {"training_arguments.json",
                         SettingsAsJson(ListSettings<TrainerSettings>(TrainerRows(), settings))});
  return emission;
}

}  // namespace shardwright
