#include "planner/emitters/hf_fsdp.h"

#include <cstddef>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/emitters/emission.h"
#include "planner/emitters/unit_classes.h"
#include "schedule/wrap.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

bool IsRootUnit(const UnitPlan& unit) {
  return unit.modules == std::vector<std::string>{""};
}

bool HasBlocks(const Model& model) {
  return !InstancesOf(model, model.block_classes).empty();
}

const std::string& ClassOf(const Model& model, const std::string& fqn) {
  return model.modules[FindModule(model, fqn).value].class_name;
}

// The units around the layers that version 2 makes by itself.
std::vector<UnitPlan> OwnUnits(const Model& model) {
  std::vector<UnitPlan> own;
  if (!HasBlocks(model)) {
    return own;
  }
  // Accelerate 1.15 looks for the norm in the model itself, which PEFT's wrapper hides: it is left
  // to the root (_find_final_norm), as is a score, which is no output embedding.
  const bool has_adapters = IsIn(model.modules, "lora_A", &Module::name);
  const WrapSpec spec = {WrapSpec::Kind::kAccelerate, 0, ""};
  for (UnitPlan& unit : Wrap(model, spec, {}, Dialect::kFsdp2, "accelerate")) {
    const bool is_block =
        unit.modules.size() == 1 && IsBlock(model, FindModule(model, unit.modules[0]));
    if (unit.modules.size() > 1) {
      std::erase_if(unit.modules, [&](const std::string& fqn) {
        return fqn.starts_with("score") ||
               (has_adapters && ClassOf(model, fqn).find("Norm") != std::string::npos);
      });
      unit.name = Listed(unit.modules, {}, "+");
    }
    if (!is_block && !IsRootUnit(unit)) {
      own.push_back(std::move(unit));
    }
  }
  return own;
}

std::vector<std::string> LayerClasses(const Model& model, const Plan& plan, std::int64_t version) {
  std::vector<UnitPlan> units = plan.units;
  std::erase_if(units, [&](const UnitPlan& unit) {  // PEFT's policy adds those of adapters
    return version == 1 &&
           (unit.modules[0].ends_with(".lora_A") || unit.modules[0].ends_with(".lora_B") ||
            unit.modules[0].ends_with(".modules_to_save"));
  });
  std::vector<std::string> classes = UnitClasses(model, units);
  if (version == 2) {
    for (const UnitPlan& unit : OwnUnits(model)) {
      for (const std::string& fqn : unit.modules) {
        std::erase(classes, ClassOf(model, fqn));
      }
    }
  }
  const bool wraps_blocks = AnyOf(plan.units, [&](const UnitPlan& unit) {
    return !unit.modules[0].empty() && IsBlock(model, FindModule(model, unit.modules[0]));
  });
  if (classes.empty() && wraps_blocks) {
    classes = model.block_classes;
  }
  return classes;
}

// What most layers do after forward; the ends of the model have rules of their own.
bool Reshards(const Plan& plan) {
  std::ptrdiff_t never = 0, others = 0;
  for (const UnitPlan& unit : plan.units) {
    if (unit.modules.size() == 1 && !IsRootUnit(unit)) {
      ++(unit.reshard.kind == Reshard::Kind::kNever ? never : others);
    }
  }
  if (never + others == 0) {
    return plan.units.back().reshard.kind != Reshard::Kind::kNever;
  }
  return others >= never;
}

void ApplyUnitsV2(const HfFsdp& settings, PlanFile& file) {
  const Model& model = file.model;
  std::vector<UnitPlan> units = UnitsOfModules(model, InstancesOf(model, settings.layer_classes));
  const std::vector<UnitPlan> layers = units;
  for (UnitPlan& unit : OwnUnits(model)) {
    std::erase_if(unit.modules,
                  [&](const std::string& fqn) { return IsIn(layers, fqn, &UnitPlan::name); });
    if (!unit.modules.empty()) {
      units.push_back(std::move(unit));
    }
  }
  if (!settings.reshard_after_forward) {
    for (UnitPlan& unit : units) {
      unit.reshard.kind = Reshard::Kind::kNever;
    }
  }
  units.push_back(RootUnitOf(Reshard::Kind::kNever));
  file.plan.units = std::move(units);
}

void ApplyUnitsV1(const HfFsdp& settings, PlanFile& file) {
  const Model& model = file.model;
  std::vector<ModuleId> modules = InstancesOf(model, settings.layer_classes);
  if (file.job.lora_rank > 0 && !modules.empty()) {
    const std::vector<ModuleId> leaves = LearningLeaves(model);
    modules.insert(modules.end(), leaves.begin(), leaves.end());
  }
  std::vector<UnitPlan> units = UnitsOfModules(model, modules);
  const WrapSpec spec = {modules.empty() ? WrapSpec::Kind::kRoot : WrapSpec::Kind::kBlock, 0, ""};
  AddReferenceUnits(model, spec, Dialect::kFsdp1, units);
  if (!settings.reshard_after_forward) {
    for (UnitPlan& unit : units) {
      unit.reshard.kind = Reshard::Kind::kNever;
    }
  }
  units.push_back(
      RootUnitOf(settings.reshard_after_forward ? Reshard::Kind::kAlways : Reshard::Kind::kNever));
  file.plan.units = std::move(units);
}

void ApplyUnits(const HfFsdp& settings, PlanFile& file) {
  const Model& model = file.model;
  if (settings.min_num_params > 0) {
    const WrapSpec spec = {WrapSpec::Kind::kSize, settings.min_num_params, ""};
    ReshardChoice reshard;
    reshard.is_set = !settings.reshard_after_forward;
    reshard.reshard.kind = Reshard::Kind::kNever;
    file.plan.units = Wrap(model, spec, reshard, file.plan.dialect, "min_num_params");
  } else if (settings.version == 2) {
    ApplyUnitsV2(settings, file);
  } else {
    ApplyUnitsV1(settings, file);
  }
}

void ApplyMesh(const HfFsdp& settings, PlanFile& file) {
  const std::int64_t ranks = file.cluster.RankCount();
  file.plan.shard_size = ranks;
  if (settings.version == 1 && settings.no_shard) {
    file.plan.shard_size = 1;
  } else if (settings.version == 1 && settings.is_hybrid) {
    if (file.cluster.gpus_per_node == 1 && ranks > 1) {
      throw InputError("fsdp_sharding_strategy", "HYBRID_SHARD on nodes of one GPU",
                       "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD",
                       "PyTorch makes it NO_SHARD inside each node, and replicas are never "
                       "synchronised");
    }
    file.plan.shard_size = file.cluster.gpus_per_node;
  } else if (settings.version == 2 && settings.dp_shard > 0) {
    file.plan.shard_size = settings.dp_shard;
  }
  file.plan.replicate_size = MeshOver(ranks, {{0, file.plan.shard_size}}).Along(Axis::kReplicate);
}

// "no" computes and reduces in the dtype that the model was loaded in. Otherwise the masters are
// upcast to fp32, and one dtype serves parameters and reductions.
void ApplyPrecision(const HfFsdp& settings, Precision& precision) {
  if (settings.mixed_precision == "no") {
    precision.param = precision.master;
    precision.reduce = precision.master;
    return;
  }
  const DType dtype = settings.mixed_precision == "fp16" ? DType::kFp16 : DType::kBf16;
  precision = {.master = DType::kFp32, .param = dtype, .reduce = dtype};
}

}  // namespace

std::vector<ModuleId> LearningLeaves(const Model& model) {
  std::vector<ModuleId> leaves;
  for (std::size_t m = 0; m < model.modules.size(); ++m) {
    const Module& module = model.modules[m];
    const auto learns = [&](ParamId p) { return model.params[p.value].trainable; };
    if (module.children.empty() && AnyOf(module.params, learns)) {
      leaves.emplace_back(m);
    }
  }
  return leaves;
}

HfFsdp HfFsdpOf(const PlanFile& file) {
  const Model& model = file.model;
  const Plan& plan = file.plan;
  HfFsdp settings;
  settings.version = plan.dialect == Dialect::kFsdp1 ? 1 : 2;
  settings.layer_classes = LayerClasses(model, plan, settings.version);
  settings.reshard_after_forward = Reshards(plan);
  settings.cpu_offload = plan.offload.parameters;
  settings.activation_checkpointing = !plan.recompute.empty() && !settings.layer_classes.empty();
  const Precision& precision = file.job.precision;
  if (precision.param != precision.master) {
    settings.mixed_precision = precision.param == DType::kFp16 ? "fp16" : "bf16";
  }
  if (settings.version == 1) {
    settings.no_shard = plan.replicate_size > 1 && plan.shard_size == 1;
    settings.is_hybrid = plan.replicate_size > 1 && !settings.no_shard &&
                         plan.shard_size == file.cluster.gpus_per_node;
    settings.reshard_after_forward |= settings.no_shard;
    settings.backward_prefetch = plan.backward_prefetch;
    settings.forward_prefetch = plan.forward_prefetch;
    settings.use_orig_params = plan.use_orig_params;
    settings.limit_all_gathers = plan.limit_all_gathers;
  } else {
    settings.activation_checkpointing_offload =
        settings.activation_checkpointing && plan.offload.activations;
    settings.dp_replicate = plan.replicate_size;
    settings.dp_shard = plan.shard_size;
  }
  return settings;
}

void ApplyHfFsdp(const HfFsdp& given, PlanFile& file) {
  const Model& model = file.model;
  HfFsdp settings = given;
  if (settings.has_layers_of_model) {
    settings.layer_classes = NoSplitClasses(model);
  }
  const bool is_v1 = settings.version == 1;
  file.plan = WithDialect(file.plan, is_v1 ? Dialect::kFsdp1 : Dialect::kFsdp2);
  if (file.plan.sync == SyncMode::kReplicateLast) {
    file.plan.sync = SyncMode::kEvery;
  }
  ApplyMesh(settings, file);
  ApplyUnits(settings, file);
  ApplyPrecision(settings, file.job.precision);
  if (is_v1) {  // its wrap policies do so unasked
    KeepFullPrecision(model, file.job.precision, file.plan);
  }
  file.plan.offload = {};
  file.plan.offload.parameters = settings.cpu_offload;
  file.plan.offload.activations = !is_v1 && settings.activation_checkpointing_offload;
  file.plan.recompute.clear();
  if (settings.activation_checkpointing) {
    file.plan.recompute = FullRecompute(model, InstancesOf(model, settings.layer_classes));
  }
  if (is_v1) {
    file.plan.backward_prefetch = settings.backward_prefetch;
    file.plan.forward_prefetch = settings.forward_prefetch;
    file.plan.use_orig_params = settings.use_orig_params;
    file.plan.limit_all_gathers = settings.limit_all_gathers;
  }
}

void ApplyHfDdp(const std::string& mixed_precision, PlanFile& file) {
  const Plan defaults;
  file.plan.first_bucket = defaults.first_bucket;
  file.plan.bucket = defaults.bucket;
  file.plan.offload = {};
  HfFsdp settings;
  settings.mixed_precision = mixed_precision;
  ApplyPrecision(settings, file.job.precision);
  file.job.precision.reduce = file.job.precision.master;  // gradients are reduced as they are kept
}

std::string ShardingStrategyName(const HfFsdp& settings) {
  if (settings.no_shard) {
    return "NO_SHARD";
  }
  if (settings.is_hybrid) {
    return settings.reshard_after_forward ? "HYBRID_SHARD" : "HYBRID_SHARD_ZERO2";
  }
  return settings.reshard_after_forward ? "FULL_SHARD" : "SHARD_GRAD_OP";
}

std::string BackwardPrefetchName(BackwardPrefetch prefetch) {
  return prefetch == BackwardPrefetch::kPre    ? "BACKWARD_PRE"
         : prefetch == BackwardPrefetch::kPost ? "BACKWARD_POST"
                                               : "NO_PREFETCH";
}

}  // namespace shardwright
