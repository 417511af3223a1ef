// VISSL: FairScale's FSDP for image models (MODEL.FSDP_CONFIG, config/defaults.yaml and
// utils/hydra_config.py of its main branch, read 2026-11-22).

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "planner/emitters/emitters.h"
#include "planner/emitters/settings.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

// The plan knows whether weights decay, not how much.
constexpr double kSomeWeightDecay = 1e-4;
constexpr double kMomentum = 0.9;

// What its trainer makes of the settings.
void Apply(const PlanFile& file, std::int64_t bucket_cap_mb, PlanFile& out) {
  const Model& model = file.model;
  out.plan = WithDialect(file.plan, Dialect::kFairscale);
  out.plan.shard_size = file.cluster.RankCount();
  out.plan.replicate_size = 1;
  out.plan.micro_batch = file.plan.micro_batch * file.plan.accumulation;
  out.plan.accumulation = 1;
  out.plan.sync = SyncMode::kEvery;
  out.plan.offload = {};
  out.plan.reduce_scatter_bucket = bucket_cap_mb * kMiB;
  const std::vector<ModuleId> blocks = BlocksOf(model);
  out.plan.units = UnitsOfModules(model, blocks);
  out.plan.units.push_back(RootUnitOf(Reshard::Kind::kNever));
  out.plan.recompute.clear();
  if (!file.plan.recompute.empty()) {
    out.plan.recompute = FullRecompute(model, blocks);
  }
  if (out.job.optimizer.kind == OptimizerKind::kAdadelta) {
    out.job.optimizer.kind = OptimizerKind::kSgd;
  }
  out.job.optimizer.impl = OptimizerImpl::kForeach;
  const DType dtype = file.job.precision.param != DType::kFp32 ? DType::kFp16 : DType::kFp32;
  out.job.precision = {.master = DType::kFp32, .param = dtype, .reduce = dtype};
}

}  // namespace

Emission EmitVissl(const PlanFile& file, const EmitOptions& options) {
  (void)options;  // VISSL has its own trainer
  const Plan& plan = file.plan;
  Emission emission;
  emission.as_emitted = file;
  const OptimizerSpec& optimizer = file.job.optimizer;
  const bool use_amp = file.job.precision.param != DType::kFp32;
  const std::int64_t bucket_cap_mb =
      plan.dialect == Dialect::kFairscale
          ? (plan.reduce_scatter_bucket.value + kMiB.value / 2) / kMiB.value
          : 25;
  std::vector<Setting> settings;
  const auto add = [&](const char* key, SettingValue value) {
    settings.push_back({std::string("config.") + key, std::move(value)});
  };
  add("DISTRIBUTED.NUM_NODES", file.cluster.node_count);
  add("DISTRIBUTED.NUM_PROC_PER_NODE", file.cluster.gpus_per_node);
  add("DATA.TRAIN.BATCHSIZE_PER_REPLICA", plan.micro_batch * plan.accumulation);
  add("MODEL.AMP_PARAMS.USE_AMP", use_amp);
  if (use_amp) {
    add("MODEL.AMP_PARAMS.AMP_TYPE", "pytorch");
  }
  add("MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP", true);
  if (use_amp) {  // O1: computes in fp32 under autocast; O2: in fp16
    add("MODEL.FSDP_CONFIG.AMP_TYPE", "O2");
  }
  add("MODEL.FSDP_CONFIG.flatten_parameters", true);
  add("MODEL.FSDP_CONFIG.bucket_cap_mb", bucket_cap_mb);
  add("MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING", !plan.recompute.empty());
  if (!plan.recompute.empty()) {
    add("MODEL.ACTIVATION_CHECKPOINTING.NUM_ACTIVATION_CHECKPOINTING_SPLITS",
        std::ssize(plan.recompute));
  }
  add("MODEL.SYNC_BN_CONFIG.SYNC_BN_TYPE", "pytorch");
  add("MODEL.GRAD_CLIP.USE_GRAD_CLIP", file.job.clip_gradients);
  add("OPTIMIZER.name", optimizer.kind == OptimizerKind::kAdam    ? "adam"
                        : optimizer.kind == OptimizerKind::kAdamW ? "adamw"
                                                                  : "sgd");
  add("OPTIMIZER.weight_decay", optimizer.weight_decay ? kSomeWeightDecay : 0.0);
  add("OPTIMIZER.momentum", optimizer.kind == OptimizerKind::kMomentum ? kMomentum : 0.0);
  add("TRAINER.TASK_NAME", "self_supervision_fsdp_task");
  Apply(file, bucket_cap_mb, emission.as_emitted);
  emission.losses = FindLosses(file, emission.as_emitted, "vissl");
  emission.by_hand.push_back("choose the trunk and head that are " + file.model.name +
                             " (regnet_fsdp wraps its blocks), the data and the loss");
  emission.files.push_back(
      {"vissl.yaml", SettingsAsYaml(settings,
                                    "@package _global_\nWritten by shardwright emit for "
                                    "VISSL; add it to an experiment's overrides.")});
  return emission;
}

}  // namespace shardwright
