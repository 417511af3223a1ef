#include "planner/emitters/fairseq.h"

#include <algorithm>
#include <array>

#include "core/json.h"
#include "planner/emitters/emitters.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

using S = FairseqSettings;

constexpr std::int64_t kMinParamsToWrap = 100'000'000;  // fairseq's DEFAULT_MIN_PARAMS_TO_WRAP
constexpr std::int64_t kBucketMib = 25;                 // its bucket_cap_mb
// The plan knows whether weights decay, not how much.
constexpr double kSomeWeightDecay = 0.01;
constexpr double kMomentum = 0.9;

constexpr std::array<SettingRow<S>, 21> kRows = {{
    {"common.fp16", &S::fp16},
    {"common.memory_efficient_fp16", &S::memory_efficient_fp16},
    {"distributed_training.ddp_backend", &S::ddp_backend},
    {"distributed_training.distributed_world_size", &S::distributed_world_size},
    {"distributed_training.no_reshard_after_forward", &S::no_reshard_after_forward},
    {"distributed_training.fp32_reduce_scatter", &S::fp32_reduce_scatter},
    {"distributed_training.cpu_offload", &S::cpu_offload},
    {"distributed_training.bucket_cap_mb", &S::bucket_cap_mb},
    {"task._name", &S::task},
    {"task.tokens_per_sample", &S::tokens_per_sample},
    {"dataset.batch_size", &S::batch_size},
    {"criterion._name", &S::criterion},
    {"optimizer._name", &S::optimizer},
    {"optimizer.weight_decay", &S::weight_decay},
    {"optimizer.momentum", &S::momentum},
    {"optimization.clip_norm", &S::clip_norm},
    {"optimization.update_freq", &S::update_freq},
    {"model._name", &S::model},
    {"model.checkpoint_activations", &S::checkpoint_activations},
    {"model.offload_activations", &S::offload_activations},
    {"model.min_params_to_wrap", &S::min_params_to_wrap},
}};

std::int64_t ElementsBelow(const Model& model, ModuleId module) {
  std::int64_t elements = 0;
  for (const Parameter& param : model.params) {
    if (!param.tied_to.valid() && IsInside(model, param.module, module)) {
      elements += param.Elements();
    }
  }
  return elements;
}

std::int64_t RoundToMib(Bytes bytes) {
  return (bytes.value + kMiB.value / 2) / kMiB.value;
}

void SetSharding(const PlanFile& file, S& s) {
  const Plan& plan = file.plan;
  if (plan.dialect == Dialect::kDdp) {
    s.ddp_backend = "pytorch_ddp";
    s.bucket_cap_mb = RoundToMib(plan.bucket);
    return;
  }
  s.ddp_backend = "fully_sharded";
  s.no_reshard_after_forward =
      plan.units.size() > 1 &&
      std::all_of(plan.units.begin(), plan.units.end() - 1,
                  [](const UnitPlan& unit) { return unit.reshard.kind == Reshard::Kind::kNever; });
  s.fp32_reduce_scatter = file.job.precision.reduce == DType::kFp32 && s.fp16.value_or(false);
  s.cpu_offload = plan.offload.parameters;
  s.bucket_cap_mb =
      plan.dialect == Dialect::kFairscale ? RoundToMib(plan.reduce_scatter_bucket) : kBucketMib;
  // Every layer is a unit, or only the root is.
  s.min_params_to_wrap = plan.units.size() > 1 ? 0 : CountParameters(file.model) + 1;
}

void SetOptimizer(const PlanFile& file, S& s) {
  const OptimizerSpec& optimizer = file.job.optimizer;
  switch (optimizer.kind) {
    case OptimizerKind::kSgd:
    case OptimizerKind::kMomentum:
      s.optimizer = "sgd";
      s.momentum = optimizer.kind == OptimizerKind::kMomentum ? kMomentum : 0.0;
      break;
    case OptimizerKind::kAdadelta:
      s.optimizer = "adadelta";
      break;
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      s.optimizer = file.plan.offload.parameters ? "cpu_adam" : "adam";
      break;
    case OptimizerKind::kLion:  // CheckEmittable
    case OptimizerKind::kAdafactor:
      break;
  }
  s.weight_decay = optimizer.weight_decay ? kSomeWeightDecay : 0.0;
}

void ApplyUnits(const S& s, bool recomputes, PlanFile& file) {
  const Model& model = file.model;
  // A checkpointed layer is wrapped whatever its size (transformer_decoder.py,
  // build_decoder_layer).
  const std::int64_t least = recomputes ? 0 : s.min_params_to_wrap.value_or(kMinParamsToWrap);
  std::vector<ModuleId> blocks = BlocksOf(model);
  std::erase_if(blocks, [&](ModuleId id) { return ElementsBelow(model, id) < least; });
  file.plan.units = UnitsOfModules(model, blocks);
  if (s.no_reshard_after_forward.value_or(false)) {
    for (UnitPlan& unit : file.plan.units) {
      unit.reshard.kind = Reshard::Kind::kNever;
    }
  }
  file.plan.units.push_back(RootUnitOf(Reshard::Kind::kNever));
}

void ApplyPrecision(const S& s, bool is_ddp, Precision& precision) {
  const bool fp16 = s.fp16.value_or(false);
  const bool efficient = s.memory_efficient_fp16.value_or(false);
  const DType param = fp16 ? DType::kFp16 : DType::kFp32;
  precision = {
      .master = fp16 && efficient ? DType::kFp16 : DType::kFp32, .param = param, .reduce = param};
  if (!is_ddp && s.fp32_reduce_scatter.value_or(false)) {
    precision.reduce = DType::kFp32;
  }
}

void ApplyOptimizer(const S& s, OptimizerSpec& optimizer) {
  const std::string name = s.optimizer.value_or("adam");
  if (name == "sgd") {
    optimizer.kind =
        s.momentum.value_or(0.0) > 0.0 ? OptimizerKind::kMomentum : OptimizerKind::kSgd;
  } else if (name == "adadelta") {
    optimizer.kind = OptimizerKind::kAdadelta;
  } else if (optimizer.kind != OptimizerKind::kAdam || s.weight_decay.value_or(0.0) > 0.0) {
    optimizer.kind = OptimizerKind::kAdamW;  // fairseq's Adam decays weights as AdamW does
  }
  optimizer.weight_decay = s.weight_decay.value_or(0.0) > 0.0;
  if (name != "adam") {
    optimizer.impl = OptimizerImpl::kForeach;
  } else if (optimizer.impl != OptimizerImpl::kFused) {  // apex's
    optimizer.impl = OptimizerImpl::kForLoop;
  }
}

}  // namespace

std::span<const SettingRow<FairseqSettings>> FairseqRows() {
  return kRows;
}

FairseqSettings ToFairseq(const PlanFile& file) {
  const Plan& plan = file.plan;
  const Precision& precision = file.job.precision;
  S s;
  s.fp16 = precision.param != DType::kFp32;
  if (*s.fp16 && precision.master != DType::kFp32) {
    s.memory_efficient_fp16 = true;
  }
  s.distributed_world_size = file.cluster.RankCount();
  SetSharding(file, s);
  s.task = "language_modeling";
  s.tokens_per_sample = file.job.sequence_length;
  s.batch_size = plan.micro_batch;
  s.criterion = "cross_entropy";
  SetOptimizer(file, s);
  s.clip_norm = file.job.clip_gradients ? 1.0 : 0.0;
  s.update_freq = std::vector<std::int64_t>{plan.accumulation};
  s.model = "transformer_lm";
  const bool recomputes = !plan.recompute.empty() && !BlocksOf(file.model).empty();
  s.checkpoint_activations = recomputes;
  if (recomputes && plan.offload.activations) {
    s.offload_activations = true;
  }
  return s;
}

void ApplyFairseq(const FairseqSettings& settings, PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  const bool is_ddp = settings.ddp_backend.value_or("pytorch_ddp") != "fully_sharded";
  file.plan = WithDialect(file.plan, is_ddp ? Dialect::kDdp : Dialect::kFairscale);
  Plan& plan = file.plan;
  plan.shard_size = is_ddp ? 1 : ranks;
  plan.replicate_size = is_ddp ? ranks : 1;
  plan.micro_batch = settings.batch_size.value_or(plan.micro_batch);
  plan.accumulation =
      settings.update_freq && !settings.update_freq->empty() ? settings.update_freq->front() : 1;
  file.job.global_batch = ranks * plan.micro_batch * plan.accumulation;
  const bool offloads = settings.offload_activations.value_or(false);
  const bool recomputes = settings.checkpoint_activations.value_or(false) || offloads;
  const Bytes bucket = settings.bucket_cap_mb.value_or(kBucketMib) * kMiB;
  if (is_ddp) {
    plan.sync = SyncMode::kLast;
    plan.bucket = bucket;
    plan.units = {RootUnitOf(Reshard::Kind::kNever)};
  } else {
    plan.sync = SyncMode::kEvery;
    plan.reduce_scatter_bucket = bucket;
    ApplyUnits(settings, recomputes, file);
  }
  plan.recompute.clear();
  if (recomputes) {
    plan.recompute = FullRecompute(file.model, BlocksOf(file.model));
  }
  plan.offload = {};
  plan.offload.parameters = !is_ddp && settings.cpu_offload.value_or(false);
  plan.offload.activations = offloads;
  ApplyPrecision(settings, is_ddp, file.job.precision);
  ApplyOptimizer(settings, file.job.optimizer);
  file.job.clip_gradients = settings.clip_norm.value_or(0.0) > 0.0;
}

Emission EmitFairseq(const PlanFile& file, const EmitOptions& options) {
  (void)options;  // fairseq has its own trainer
  Emission emission;
  emission.as_emitted = file;
  const S settings = ToFairseq(file);
  ApplyFairseq(settings, emission.as_emitted);
  if (emission.as_emitted.job.optimizer.impl == OptimizerImpl::kFused) {
    emission.by_hand.emplace_back("install apex: fairseq's Adam is fused only with it");
  }
  emission.has_sequence = true;
  emission.losses = FindLosses(file, emission.as_emitted, "fairseq");
  emission.by_hand.push_back("set the model's sizes to those of " + file.model.name +
                             ", and the data, learning rate and schedule");
  if (file.job.optimizer.weight_decay) {
    emission.by_hand.emplace_back("set the weight decay (0.01 stands for any)");
  }
  emission.by_hand.emplace_back(
      "start it with: fairseq-hydra-train --config-dir . --config-name "
      "fairseq");
  emission.files.push_back(
      {"fairseq.yaml", SettingsAsYaml(ListSettings<FairseqSettings>(kRows, settings),
                                      "Written by shardwright emit for fairseq 0.12.")});
  return emission;
}

}  // namespace shardwright
