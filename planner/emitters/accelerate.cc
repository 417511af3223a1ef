#include "planner/emitters/accelerate.h"

#include <string_view>

#include "core/error.h"
#include "core/text.h"
#include "planner/emitters/emitters.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/lower/optimizer.h"
#include "schedule/plan_names.h"

namespace shardwright {
namespace {

std::vector<std::string> Split(std::string_view text) {
  std::vector<std::string> list;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    list.emplace_back(text.substr(0, comma));
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
  }
  return list;
}

AccelerateSettings LaunchSettings(const Cluster& cluster) {
  AccelerateSettings settings;
  settings.compute_environment = "LOCAL_MACHINE";
  settings.num_machines = cluster.node_count;
  settings.num_processes = cluster.RankCount();
  settings.machine_rank = 0;
  settings.rdzv_backend = cluster.node_count > 1 ? "c10d" : "static";
  return settings;
}

void ReadStrategy(const AccelerateSettings& settings, const std::string& where, HfFsdp& fsdp) {
  const std::string name = settings.fsdp_sharding_strategy.value_or("FULL_SHARD");
  if (name != "FULL_SHARD" && name != "SHARD_GRAD_OP" && name != "NO_SHARD" &&
      name != "HYBRID_SHARD" && name != "HYBRID_SHARD_ZERO2") {
    RefuseSetting(where, "fsdp_config.fsdp_sharding_strategy", name,
                  "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2");
  }
  fsdp.is_hybrid = name.starts_with("HYBRID");
  fsdp.no_shard = name == "NO_SHARD";
  fsdp.reshard_after_forward = name != "SHARD_GRAD_OP" && name != "HYBRID_SHARD_ZERO2";
  const std::string prefetch = settings.fsdp_backward_prefetch.value_or("NO_PREFETCH");
  if (prefetch != "BACKWARD_PRE" && prefetch != "BACKWARD_POST" && prefetch != "NO_PREFETCH") {
    RefuseSetting(where, "fsdp_config.fsdp_backward_prefetch", prefetch,
                  "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH");
  }
  fsdp.backward_prefetch = prefetch == "BACKWARD_PRE"    ? BackwardPrefetch::kPre
                           : prefetch == "BACKWARD_POST" ? BackwardPrefetch::kPost
                                                         : BackwardPrefetch::kNone;
  fsdp.forward_prefetch = settings.fsdp_forward_prefetch.value_or(false);
  fsdp.use_orig_params = settings.fsdp_use_orig_params.value_or(true);  // of the launcher
}

}  // namespace

AccelerateSettings ToAccelerate(const HfFsdp& fsdp, const Cluster& cluster) {
  AccelerateSettings settings = LaunchSettings(cluster);
  settings.distributed_type = "FSDP";
  settings.mixed_precision = fsdp.mixed_precision;
  settings.fsdp_version = fsdp.version;
  settings.fsdp_auto_wrap_policy = fsdp.min_num_params > 0      ? "SIZE_BASED_WRAP"
                                   : fsdp.layer_classes.empty() ? "NO_WRAP"
                                                                : "TRANSFORMER_BASED_WRAP";
  if (fsdp.min_num_params > 0) {
    settings.fsdp_min_num_params = fsdp.min_num_params;
  } else if (!fsdp.layer_classes.empty()) {
    settings.fsdp_transformer_layer_cls_to_wrap = Listed(fsdp.layer_classes, std::identity(), ",");
  }
  settings.fsdp_offload_params = fsdp.cpu_offload;
  settings.fsdp_state_dict_type = "SHARDED_STATE_DICT";
  settings.fsdp_activation_checkpointing = fsdp.activation_checkpointing;
  if (fsdp.version == 1) {
    settings.fsdp_sharding_strategy = ShardingStrategyName(fsdp);
    settings.fsdp_backward_prefetch = BackwardPrefetchName(fsdp.backward_prefetch);
    settings.fsdp_forward_prefetch = fsdp.forward_prefetch;
    settings.fsdp_use_orig_params = fsdp.use_orig_params;
    settings.fsdp_sync_module_states = true;
    return settings;
  }
  settings.fsdp_reshard_after_forward = fsdp.reshard_after_forward;
  if (fsdp.activation_checkpointing_offload) {
    settings.fsdp_activation_checkpointing_offload = true;
  }
  if (fsdp.dp_replicate > 1) {
    settings.dp_replicate_size = fsdp.dp_replicate;
    settings.dp_shard_size = fsdp.dp_shard;
  }
  return settings;
}

HfFsdp FromAccelerate(const AccelerateSettings& settings, const std::string& where) {
  HfFsdp fsdp;
  fsdp.version = settings.fsdp_version.value_or(1);
  if (fsdp.version != 1 && fsdp.version != 2) {
    RefuseSetting(where, "fsdp_config.fsdp_version", std::to_string(fsdp.version), "1 or 2");
  }
  fsdp.mixed_precision = settings.mixed_precision.value_or("no");
  if (fsdp.mixed_precision != "no" && fsdp.mixed_precision != "bf16" &&
      fsdp.mixed_precision != "fp16") {
    RefuseSetting(where, "mixed_precision", fsdp.mixed_precision, "no, bf16 or fp16");
  }
  const std::string policy = settings.fsdp_auto_wrap_policy.value_or("NO_WRAP");
  if (policy == "TRANSFORMER_BASED_WRAP") {
    fsdp.has_layers_of_model = !settings.fsdp_transformer_layer_cls_to_wrap.has_value();
    fsdp.layer_classes = Split(settings.fsdp_transformer_layer_cls_to_wrap.value_or(""));
  } else if (policy == "SIZE_BASED_WRAP") {
    fsdp.min_num_params = settings.fsdp_min_num_params.value_or(kLauncherMinNumParams);
  } else if (policy != "NO_WRAP") {
    RefuseSetting(where, "fsdp_config.fsdp_auto_wrap_policy", policy,
                  "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP");
  }
  fsdp.cpu_offload = settings.fsdp_offload_params.value_or(false);
  fsdp.activation_checkpointing = settings.fsdp_activation_checkpointing.value_or(false);
  if (fsdp.version == 1) {
    ReadStrategy(settings, where, fsdp);
    return fsdp;
  }
  fsdp.reshard_after_forward = settings.fsdp_reshard_after_forward.value_or(true);
  fsdp.activation_checkpointing_offload =
      settings.fsdp_activation_checkpointing_offload.value_or(false);
  fsdp.dp_replicate = settings.dp_replicate_size.value_or(1);
  fsdp.dp_shard = settings.dp_shard_size.value_or(0) * settings.context_size.value_or(1);
  return fsdp;
}

namespace {

// PyTorch's DistributedDataParallel with its own buckets.
AccelerateSettings DdpSettings(const PlanFile& file, Emission& emission) {
  AccelerateSettings settings = LaunchSettings(file.cluster);
  const HfFsdp fsdp = HfFsdpOf(file);
  settings.distributed_type = "MULTI_GPU";
  settings.mixed_precision = fsdp.mixed_precision;
  PlanFile& emitted = emission.as_emitted;
  ApplyHfDdp(fsdp.mixed_precision, emitted);
  if (FindsUnused(file.plan)) {
    emission.by_hand.push_back(
        std::string("pass Accelerator a DistributedDataParallelKwargs(find_unused_parameters=") +
        (file.plan.find_unused_parameters ? "True" : "False") +
        ", static_graph=" + (file.plan.static_graph ? "True)" : "False)"));
  }
  if (RecomputesEveryBlock(file.model, file.plan)) {
    emission.by_hand.emplace_back("call model.gradient_checkpointing_enable()");
  } else {
    emitted.plan.recompute.clear();
  }
  return settings;
}

// DeepSpeed's own file does the work.
AccelerateSettings ZeroSettings(const PlanFile& file, const EmitOptions& options,
                                Emission& emission) {
  emission = EmitDeepSpeed(file, options);
  AccelerateSettings settings = LaunchSettings(file.cluster);
  settings.distributed_type = "DEEPSPEED";
  settings.deepspeed_config_file = emission.files[0].name;
  settings.zero3_init_flag = file.plan.dialect == Dialect::kZero3;
  return settings;
}

}  // namespace

Emission EmitAccelerate(const PlanFile& file, const EmitOptions& options) {
  Emission emission;
  emission.as_emitted = file;
  AccelerateSettings settings;
  if (IsZero(file.plan.dialect)) {
    settings = ZeroSettings(file, options, emission);
  } else if (file.plan.dialect == Dialect::kDdp) {
    settings = DdpSettings(file, emission);
  } else {
    HfFsdp fsdp = HfFsdpOf(file);
    fsdp.limit_all_gathers = true;  // the plugin's; no key changes it
    ApplyHfFsdp(fsdp, emission.as_emitted);
    settings = ToAccelerate(fsdp, file.cluster);
  }
  if (!IsZero(file.plan.dialect)) {
    emission.losses = FindLosses(file, emission.as_emitted, "accelerate");
    const Plan& plan = file.plan;
    const OptimizerSpec& optimizer = file.job.optimizer;
    emission.by_hand.push_back(
        "your script sets batch size " + std::to_string(plan.micro_batch) + ", optimizer " +
        (optimizer.states != StateFormat::kMaster && !WordOf(optimizer).empty()
             ? std::string(WordOf(optimizer))
             : std::string(NameIn(kOptimizerNames, optimizer.kind)) + ":" +
                   std::string(NameIn(kOptimizerImplNames, optimizer.impl)) +
                   (optimizer.states != StateFormat::kMaster
                        ? " with states " + std::string(NameIn(kStateFormatNames, optimizer.states))
                        : "")) +
        (optimizer.weight_decay ? " with" : " without") + " weight decay, and " +
        (file.job.clip_gradients ? "clips" : "does not clip") + " gradients by their norm");
    if (plan.accumulation > 1) {
      emission.by_hand.push_back("pass Accelerator a GradientAccumulationPlugin(num_steps=" +
                                 std::to_string(plan.accumulation) + ", sync_each_batch=" +
                                 (plan.sync == SyncMode::kLast ? "False)" : "True)"));
    }
    if (file.job.precision.param == file.job.precision.master &&
        file.job.precision.param != DType::kFp32) {
      emission.by_hand.push_back("load the model in its 16-bit dtype");
    }
  }
  std::string launch = "accelerate launch --config_file accelerate.yaml " + options.script;
  if (file.cluster.node_count > 1) {
    launch += "\non every node, with --machine_rank, --main_process_ip and --main_process_port";
  }
  emission.files.insert(
      emission.files.begin(),
      {"accelerate.yaml",
       SettingsAsYaml(ListSettings<AccelerateSettings>(AccelerateRows(), settings),
                      "Written by shardwright emit for Accelerate 1.15.\n" + launch)});
  return emission;
}

}  // namespace shardwright
