#include "planner/emitters/deepspeed.h"

#include <array>
#include <utility>

#include "core/lookup.h"
#include "core/ranges.h"
#include "planner/emitters/emitters.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using S = DeepSpeedSettings;

// The plan knows that there are a learning rate and a weight decay, not their values.
constexpr double kSomeLearningRate = 1e-4;
constexpr double kSomeWeightDecay = 0.01;
constexpr double kMomentum = 0.9;

constexpr const char* kHost = "cpu";

// Of stages 0 to 2; every other dialect is nearest to stage 3.
constexpr std::array<Dialect, 3> kStages = {Dialect::kDdp, Dialect::kZero1, Dialect::kZero2};

std::int64_t StageOf(Dialect dialect) {
  return FindIn(kStages, dialect) - kStages.begin();
}

bool HasParametersBelow(const Model& model, ModuleId id) {
  for (const ModuleId child : model.modules[id.value].children) {
    if (!model.modules[child.value].params.empty() || HasParametersBelow(model, child)) {
      return true;
    }
  }
  return false;
}

bool HoldsAnotherUnit(const Model& model, const Plan& plan, ModuleId id) {
  return AnyOf(plan.units, [&](const UnitPlan& unit) {
    return std::any_of(unit.modules.begin(), unit.modules.end(), [&](const std::string& fqn) {
      const ModuleId other = FindModule(model, fqn);
      return other != id && IsInside(model, other, id);
    });
  });
}

// Unit classes whose modules DeepSpeed would fetch piece by piece. Where a piece is a unit, too, it
// is to do that.
std::vector<std::string> LeafClasses(const Model& model, const Plan& plan) {
  std::vector<std::string> classes = UnitClasses(model, plan.units);
  std::erase_if(classes, [&](const std::string& name) {
    const std::vector<ModuleId> instances = InstancesOf(model, {name});
    return NoneOf(instances, [&](ModuleId id) {
      return HasParametersBelow(model, id) && !HoldsAnotherUnit(model, plan, id);
    });
  });
  return classes;
}

// Of the units that are one module of a repeated class, or of all where there is none.
std::int64_t LargestUnit(const PlanFile& file) {
  const std::vector<std::string> classes = LeafClasses(file.model, file.plan);
  std::int64_t largest = 0, largest_repeated = 0;
  for (const ResolvedUnit& unit : ResolveUnits(file.model, file.plan, "plan")) {
    const std::int64_t elements = Summed<std::int64_t>(
        unit.params, [&](const ParamId id) { return file.model.params[id.value].Elements(); });
    largest = std::max(largest, elements);
    const std::string& name = file.model.modules[unit.modules[0].value].class_name;
    if (IsIn(classes, name)) {
      largest_repeated = std::max(largest_repeated, elements);
    }
  }
  return largest_repeated > 0 ? largest_repeated : largest;
}

// Budgets in elements that do what a plan of another dialect asks for: one unit is fetched ahead,
// and what is never freed after forward is kept.
ZeroOptions BudgetsOf(const PlanFile& file) {
  ZeroOptions zero;
  zero.prefetch_bucket = LargestUnit(file);
  const std::vector<UnitPlan>& units = file.plan.units;
  const bool frees = std::any_of(units.begin(), units.end() - 1, [](const UnitPlan& unit) {
    return unit.reshard.kind != Reshard::Kind::kNever && unit.modules.size() == 1;
  });
  const std::int64_t all = 2 * CountParameters(file.model);
  zero.max_reuse_distance = frees ? 0 : all;
  zero.max_live_parameters = frees ? std::min(all, zero.max_live_parameters) : all;
  return zero;
}

void SetOffload(const Offload& offload, S& s) {
  if (offload.optimizer || offload.parameters) {
    s.offload_optimizer = kHost;
    s.offload_optimizer_pinned = true;
  }
  if (offload.parameters) {
    s.offload_param = kHost;
    s.offload_param_pinned = true;
  }
}

void SetZeroKeys(const PlanFile& file, S& s) {
  const Plan& plan = file.plan;
  const ZeroOptions zero = IsZero(plan.dialect) ? plan.zero
                           : *s.stage == 3      ? BudgetsOf(file)
                                                : ZeroOptions();
  s.contiguous_gradients = zero.contiguous_gradients;
  if (zero.overlap_comm != Overlap::kDefault) {
    s.overlap_comm = zero.overlap_comm == Overlap::kOn;
  }
  s.reduce_bucket_size = zero.reduce_bucket;
  if (*s.stage < 3) {
    // One all-gather for everything, where the plan says 0.
    s.allgather_bucket_size =
        zero.allgather_bucket > 0 ? zero.allgather_bucket : 2 * CountParameters(file.model);
    return;
  }
  SetOffload(plan.offload, s);
  if (zero.gradient_reduction != GradientReduction::kDefault) {
    s.reduce_scatter = zero.gradient_reduction == GradientReduction::kReduceScatter;
  }
  s.prefetch_bucket_size = zero.prefetch_bucket;
  s.param_persistence_threshold = zero.persistence_threshold;
  s.max_live_parameters = zero.max_live_parameters;
  s.max_reuse_distance = zero.max_reuse_distance;
  s.sub_group_size = zero.sub_group;
  const std::vector<std::string> leaves = LeafClasses(file.model, plan);
  if (!leaves.empty()) {
    s.leaf_module_classes = leaves;
  }
}

void SetOptimizer(const OptimizerSpec& optimizer, S& s) {
  using Kind = OptimizerKind;
  static constexpr std::array<std::pair<Kind, const char*>, 6> kNames = {
      {{Kind::kSgd, "SGD"},
       {Kind::kMomentum, "SGD"},
       {Kind::kAdam, "Adam"},
       {Kind::kAdamW, "AdamW"},
       {Kind::kAdadelta, "Adadelta"},
       {Kind::kLion, "Lion"}}};
  s.optimizer = ValueOf(kNames, optimizer.kind, "");  // CheckEmittable refuses the others
  s.learning_rate = kSomeLearningRate;
  s.weight_decay = optimizer.weight_decay ? kSomeWeightDecay : 0.0;
  if (optimizer.kind == OptimizerKind::kMomentum) {
    s.momentum = kMomentum;
  }
  if (*s.optimizer == "Adam" || *s.optimizer == "AdamW") {
    // On the host DeepSpeed's own Adam, which torch_adam would replace, takes one pass.
    s.torch_adam = optimizer.impl != OptimizerImpl::kFused && s.offload_optimizer != kHost;
  }
}

Dialect DialectOfStage(std::int64_t stage) {
  return stage < 0 || stage > 2 ? Dialect::kZero3 : kStages[static_cast<std::size_t>(stage)];
}

void ApplyPrecision(const S& s, Precision& precision) {
  const bool bf16 = s.bf16.value_or(false);
  const bool fp16 = s.fp16.value_or(false);
  const DType param = bf16 ? DType::kBf16 : fp16 ? DType::kFp16 : DType::kFp32;
  const std::string reduce =
      s.communication_data_type.value_or(std::string(NameIn(kTrainingDTypeNames, param)));
  precision = {.master = DType::kFp32, .param = param, .reduce = param};
  for (std::size_t i = 0; i < kTrainingDTypeNames.size(); ++i) {
    if (kTrainingDTypeNames[i] == reduce) {
      precision.reduce = static_cast<DType>(i);
    }
  }
}

void ApplyOptimizer(const S& s, OptimizerSpec& optimizer) {
  if (!s.optimizer) {
    return;  // the script brings its own
  }
  const bool has_momentum = s.momentum.value_or(0.0) > 0.0;
  optimizer.kind = *s.optimizer == "SGD"
                       ? (has_momentum ? OptimizerKind::kMomentum : OptimizerKind::kSgd)
                   : *s.optimizer == "Adam"     ? OptimizerKind::kAdam
                   : *s.optimizer == "Adadelta" ? OptimizerKind::kAdadelta
                   : *s.optimizer == "Lion"     ? OptimizerKind::kLion
                                                : OptimizerKind::kAdamW;
  const bool is_own = *s.optimizer == "Adam" || *s.optimizer == "AdamW" || *s.optimizer == "Lion";
  optimizer.impl =
      is_own && !s.torch_adam.value_or(false) ? OptimizerImpl::kFused : OptimizerImpl::kForeach;
  optimizer.weight_decay = s.weight_decay.value_or(0.0) > 0.0;
}

void ApplyZero(const S& s, PlanFile& file) {
  Plan& plan = file.plan;
  ZeroOptions& zero = plan.zero;
  const ZeroOptions defaults;
  zero.contiguous_gradients = s.contiguous_gradients.value_or(true);
  if (s.overlap_comm) {
    zero.overlap_comm = *s.overlap_comm ? Overlap::kOn : Overlap::kOff;
  }
  zero.reduce_bucket = s.reduce_bucket_size.value_or(defaults.reduce_bucket);
  if (plan.dialect != Dialect::kZero3) {
    constexpr std::int64_t kDefaultBucket = 500'000'000;
    const std::int64_t bucket = s.allgather_bucket_size.value_or(kDefaultBucket);
    zero.allgather_bucket = bucket >= CountParameters(file.model) ? 0 : bucket;
    plan.units = {RootUnitOf(Reshard::Kind::kAlways)};
    return;
  }
  if (s.reduce_scatter) {
    zero.gradient_reduction =
        *s.reduce_scatter ? GradientReduction::kReduceScatter : GradientReduction::kAllReduce;
  }
  plan.offload.parameters = s.offload_param == kHost;
  plan.offload.optimizer = s.offload_optimizer == kHost && !plan.offload.parameters;
  zero.prefetch_bucket = s.prefetch_bucket_size.value_or(defaults.prefetch_bucket);
  zero.persistence_threshold =
      s.param_persistence_threshold.value_or(defaults.persistence_threshold);
  zero.max_live_parameters = s.max_live_parameters.value_or(defaults.max_live_parameters);
  zero.max_reuse_distance = s.max_reuse_distance.value_or(defaults.max_reuse_distance);
  // 0 makes a group of each parameter, as 1 does (stage3.py, _create_fp16_sub_groups).
  zero.sub_group = std::max<std::int64_t>(1, s.sub_group_size.value_or(defaults.sub_group));
  plan.units = FetchedUnits(file.model, s.leaf_module_classes.value_or(std::vector<std::string>()));
}

}  // namespace

std::vector<UnitPlan> FetchedUnits(const Model& model, const std::vector<std::string>& classes) {
  const std::vector<ModuleId> leaves = InstancesOf(model, classes);
  std::vector<UnitPlan> units = UnitsOfModules(model, leaves);
  const WrapSpec spec = {WrapSpec::Kind::kModule, 0, ""};
  for (UnitPlan& unit : Wrap(model, spec, {}, Dialect::kZero3, "leaf_module")) {
    std::erase_if(unit.modules, [&](const std::string& fqn) {
      const ModuleId id = FindModule(model, fqn);
      return AnyOf(leaves, [&](ModuleId leaf) { return IsInside(model, id, leaf); });
    });
    if (!unit.modules.empty()) {
      units.push_back(std::move(unit));
    }
  }
  return units;
}

DeepSpeedSettings ToDeepSpeed(const PlanFile& file) {
  const Plan& plan = file.plan;
  const Precision& precision = file.job.precision;
  S s;
  s.train_batch_size = MeshOf(plan).RankCount() * plan.micro_batch * plan.accumulation;
  s.train_micro_batch_size_per_gpu = plan.micro_batch;
  s.gradient_accumulation_steps = plan.accumulation;
  s.gradient_clipping = file.job.clip_gradients ? 1.0 : 0.0;
  if (precision.param == DType::kBf16) {
    s.bf16 = true;
  } else if (precision.param == DType::kFp16) {
    s.fp16 = true;
  }
  s.communication_data_type = std::string(NameIn(kTrainingDTypeNames, precision.reduce));
  s.stage = StageOf(plan.dialect);
  SetZeroKeys(file, s);
  SetOptimizer(file.job.optimizer, s);
  return s;
}

void ApplyDeepSpeed(const DeepSpeedSettings& settings, PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  file.plan = WithDialect(file.plan, DialectOfStage(settings.stage.value_or(0)));
  Plan& plan = file.plan;
  plan.offload = {};
  plan.sync = SyncMode::kEvery;
  plan.micro_batch = settings.train_micro_batch_size_per_gpu.value_or(plan.micro_batch);
  plan.accumulation = settings.gradient_accumulation_steps.value_or(1);
  file.job.global_batch = ranks * plan.micro_batch * plan.accumulation;
  plan.shard_size = ranks;
  if (plan.dialect == Dialect::kDdp) {
    plan.shard_size = 1;
    plan.units = {RootUnitOf(Reshard::Kind::kNever)};
  } else {
    if (plan.dialect == Dialect::kZero3 && settings.mics_shard_size.value_or(-1) > 0) {
      plan.shard_size = *settings.mics_shard_size;
    }
    ApplyZero(settings, file);
  }
  plan.replicate_size = MeshOver(ranks, {{0, plan.shard_size}}).Along(Axis::kReplicate);
  ApplyPrecision(settings, file.job.precision);
  ApplyOptimizer(settings, file.job.optimizer);
  file.job.clip_gradients = settings.gradient_clipping.value_or(0.0) > 0.0;
}

Emission EmitDeepSpeed(const PlanFile& file, const EmitOptions& options) {
  Emission emission;
  emission.as_emitted = file;
  const S settings = ToDeepSpeed(file);
  ApplyDeepSpeed(settings, emission.as_emitted);
  emission.as_emitted.plan.zero.allgather_bucket = 0;
  if (RecomputesEveryBlock(file.model, file.plan)) {
    emission.by_hand.emplace_back("call model.gradient_checkpointing_enable()");
  } else {
    emission.as_emitted.plan.recompute.clear();
  }
  emission.losses = FindLosses(file, emission.as_emitted, "deepspeed");
  emission.by_hand.emplace_back(
      "set the learning rate and the weight decay; those in the file "
      "stand for any");
  emission.by_hand.push_back("start it with: deepspeed --num_nodes " +
                             std::to_string(file.cluster.node_count) + " --num_gpus " +
                             std::to_string(file.cluster.gpus_per_node) + " " + options.script +
                             " --deepspeed_config ds_config.json");
  emission.files.push_back({"ds_config.json", SettingsAsJson(ListSettings<DeepSpeedSettings>(
                                                  DeepSpeedRows(), settings))});
  return emission;
}

}  // namespace shardwright
