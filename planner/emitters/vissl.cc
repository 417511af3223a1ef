// VISSL: FairScale's FSDP for image models (MODEL.FSDP_CONFIG, config/defaults.yaml and
// utils/hydra_config.py of its main branch, read 2026-11-22).

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "planner/emitters/emitters.h"
#include "planner/emitters/settings.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

struct VisslSettings {
  std::optional<std::int64_t> num_nodes;
  std::optional<std::int64_t> num_proc_per_node;
  std::optional<std::int64_t> batch_size;
  std::optional<bool> use_amp;
  std::optional<std::string> amp_type;
  std::optional<bool> auto_setup;
  std::optional<std::string> fsdp_amp_type;  // O1: computes in fp32 under autocast; O2: in fp16
  std::optional<bool> flatten;
  std::optional<std::int64_t> bucket_cap_mb;
  std::optional<bool> checkpointing;
  std::optional<std::int64_t> checkpointing_splits;
  std::optional<std::string> sync_bn;
  std::optional<std::string> optimizer;
  std::optional<double> weight_decay;
  std::optional<double> momentum;
  std::optional<bool> clips;
  std::optional<std::string> task;
};

using S = VisslSettings;

// The plan knows whether weights decay, not how much.
constexpr double kSomeWeightDecay = 1e-4;
constexpr double kMomentum = 0.9;

constexpr std::array<SettingRow<S>, 17> kRows = {{
    {"config.DISTRIBUTED.NUM_NODES", &S::num_nodes},
    {"config.DISTRIBUTED.NUM_PROC_PER_NODE", &S::num_proc_per_node},
    {"config.DATA.TRAIN.BATCHSIZE_PER_REPLICA", &S::batch_size},
    {"config.MODEL.AMP_PARAMS.USE_AMP", &S::use_amp},
    {"config.MODEL.AMP_PARAMS.AMP_TYPE", &S::amp_type},
    {"config.MODEL.FSDP_CONFIG.AUTO_SETUP_FSDP", &S::auto_setup},
    {"config.MODEL.FSDP_CONFIG.AMP_TYPE", &S::fsdp_amp_type},
    {"config.MODEL.FSDP_CONFIG.flatten_parameters", &S::flatten},
    {"config.MODEL.FSDP_CONFIG.bucket_cap_mb", &S::bucket_cap_mb},
    {"config.MODEL.ACTIVATION_CHECKPOINTING.USE_ACTIVATION_CHECKPOINTING", &S::checkpointing},
    {"config.MODEL.ACTIVATION_CHECKPOINTING.NUM_ACTIVATION_CHECKPOINTING_SPLITS",
     &S::checkpointing_splits},
    {"config.MODEL.SYNC_BN_CONFIG.SYNC_BN_TYPE", &S::sync_bn},
    {"config.MODEL.GRAD_CLIP.USE_GRAD_CLIP", &S::clips},
    {"config.OPTIMIZER.name", &S::optimizer},
    {"config.OPTIMIZER.weight_decay", &S::weight_decay},
    {"config.OPTIMIZER.momentum", &S::momentum},
    {"config.TRAINER.TASK_NAME", &S::task},
}};

void Apply(const PlanFile& file, const S& s, PlanFile& out) {
  const Model& model = file.model;
  out.plan = WithDialect(file.plan, Dialect::kFairscale);
  out.plan.shard_size = file.cluster.RankCount();
  out.plan.replicate_size = 1;
  out.plan.micro_batch = file.plan.micro_batch * file.plan.accumulation;
  out.plan.accumulation = 1;
  out.plan.sync = SyncMode::kEvery;
  out.plan.offload = {};
  out.plan.reduce_scatter_bucket = *s.bucket_cap_mb * kMiB;
  const std::vector<ModuleId> blocks = BlocksOf(model);
  out.plan.units = UnitsOfModules(model, blocks);
  out.plan.units.push_back(RootUnitOf(Reshard::Kind::kNever));
  out.plan.recompute.clear();
  if (*s.checkpointing) {
    out.plan.recompute = FullRecompute(model, blocks);
  }
  if (*s.optimizer == "sgd" && out.job.optimizer.kind == OptimizerKind::kAdadelta) {
    out.job.optimizer.kind = OptimizerKind::kSgd;
  }
  out.job.optimizer.impl = OptimizerImpl::kForeach;
  const DType dtype = *s.use_amp ? DType::kFp16 : DType::kFp32;
  out.job.precision = {.master = DType::kFp32, .param = dtype, .reduce = dtype};
}

}  // namespace

Emission EmitVissl(const PlanFile& file, const EmitOptions& options) {
  (void)options;  // VISSL has its own trainer
  const Plan& plan = file.plan;
  Emission emission;
  emission.as_emitted = file;
  S s;
  s.num_nodes = file.cluster.node_count;
  s.num_proc_per_node = file.cluster.gpus_per_node;
  s.batch_size = plan.micro_batch * plan.accumulation;
  s.use_amp = file.job.precision.param != DType::kFp32;
  if (*s.use_amp) {
    s.amp_type = "pytorch";
    s.fsdp_amp_type = "O2";
  }
  s.auto_setup = true;
  s.flatten = true;
  s.bucket_cap_mb = plan.dialect == Dialect::kFairscale
                        ? (plan.reduce_scatter_bucket.value + kMiB.value / 2) / kMiB.value
                        : 25;
  s.checkpointing = !plan.recompute.empty();
  if (*s.checkpointing) {
    s.checkpointing_splits = static_cast<std::int64_t>(plan.recompute.size());
  }
  s.sync_bn = "pytorch";
  const OptimizerKind kind = file.job.optimizer.kind;
  s.optimizer = kind == OptimizerKind::kAdam    ? "adam"
                : kind == OptimizerKind::kAdamW ? "adamw"
                                                : "sgd";
  s.weight_decay = file.job.optimizer.weight_decay ? kSomeWeightDecay : 0.0;
  s.momentum = kind == OptimizerKind::kMomentum ? kMomentum : 0.0;
  s.clips = file.job.clip_gradients;
  s.task = "self_supervision_fsdp_task";
  Apply(file, s, emission.as_emitted);
  emission.losses = FindLosses(file, emission.as_emitted, "vissl");
  emission.by_hand.push_back("choose the trunk and head that are " + file.model.name +
                             " (regnet_fsdp wraps its blocks), the data and the loss");
  emission.files.push_back(
      {"vissl.yaml", SettingsAsYaml(ListSettings<S>(kRows, s),
                                    "@package _global_\nWritten by shardwright emit for "
                                    "VISSL; add it to an experiment's overrides.")});
  return emission;
}

}  // namespace shardwright
