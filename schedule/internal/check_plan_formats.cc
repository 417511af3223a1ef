#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"
#include "schedule/internal/check_plan.h"
#include "schedule/plan_names.h"

namespace shardwright::internal {
namespace {

// Units with parameters that learn and others that do not are refused.
void CheckUniformUnits(const Model& model, const Plan& plan, const std::string& where,
                       const std::string& why) {
  const std::vector<ResolvedUnit> units = ResolveUnits(model, plan, where);
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (const ParamId id : units[u].params) {
      const Parameter& param = model.params[id.value];
      const Parameter& first = model.params[units[u].params[0].value];
      if (param.trainable != first.trainable) {
        throw InputError(UnitField(where, u, "modules"),
                         "trainable and frozen parameters (" + Quoted(first.fqn) + ", " +
                             Quoted(param.fqn) + ")",
                         "all trainable or all frozen " + why);
      }
    }
  }
}

[[noreturn]] void RefuseFormat(const std::string& where, const char* field, std::string_view name,
                               const std::string& expected, const std::string& hint) {
  throw InputError(where, "a job with " + std::string(field) + " " + Quoted(name), expected, hint);
}

// Which dialects update states of this format, or by this optimizer.
void CheckUpdateFormat(const Job& job, const Plan& plan, const std::string& where) {
  const OptimizerSpec& optimizer = job.optimizer;
  const std::string_view states = NameIn(kStateFormatNames, optimizer.states);
  const bool is_adafactor = optimizer.kind == OptimizerKind::kAdafactor;
  if (is_adafactor && plan.dialect != Dialect::kDdp && plan.dialect != Dialect::kFsdp1) {
    RefuseFormat(where, "optimizer.kind", "adafactor", "dialect ddp or fsdp1",
                 "Transformers' Adafactor mixes tensors of its own with those of FSDP2");
  }
  if (is_adafactor &&
      (optimizer.states != StateFormat::kFp32 || optimizer.impl != OptimizerImpl::kForLoop)) {
    RefuseFormat(where, "optimizer.kind", "adafactor", "impl for_loop and states fp32",
                 "Transformers' Adafactor goes from parameter to parameter in fp32");
  }
  if (optimizer.states == StateFormat::kMaster) {
    return;
  }
  if (!IsTorch(plan.dialect) && !IsZero(plan.dialect)) {
    RefuseFormat(where, "optimizer.states", states, "a dialect of PyTorch or DeepSpeed",
                 "dialect " + std::string(NameOf(plan.dialect)) + " keeps states as masters");
  }
  const bool is_lion = optimizer.kind == OptimizerKind::kLion &&
                       optimizer.states != StateFormat::kAo8 &&
                       optimizer.states != StateFormat::kAo4;
  if (optimizer.kind != OptimizerKind::kAdam && optimizer.kind != OptimizerKind::kAdamW &&
      !is_lion && !is_adafactor) {
    RefuseFormat(where, "optimizer.states", states, "optimizer adam or adamw",
                 "no other one is known so");
  }
  if (plan.offload.parameters || plan.offload.optimizer ||
      optimizer.matrices != MatrixRule::kNone) {
    RefuseFormat(where, "optimizer.states", states,
                 "updates on the device, without matrices of their own",
                 "packed states are updated where they are");
  }
}

bool RecomputesExperts(const Model& model, const Plan& plan) {
  const auto is_region = [&](const Module& module) {
    return AnyOf(plan.recompute, [&](const RecomputeRegion& region) {
      return region.module == module.fqn && region.kind == RecomputeKind::kFull &&
             region.keep_every == 1;
    });
  };
  return AllOf(model.ops, [&](const ModelOp& op) {
    bool is_inside = model.SpecOf(op).kind != OpKind::kExperts;
    for (ModuleId m = op.module; m.valid() && !is_inside; m = model.modules[m.value].parent) {
      is_inside = is_region(model.modules[m.value]);
    }
    return is_inside;
  });
}

// Autograd has the gradients of an op in one dtype here, and lists of an update have one.
void CheckWide(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  if (job.fp32_masters.empty()) {
    return;
  }
  const std::string& first = job.fp32_masters.front();
  if (plan.dialect != Dialect::kDdp || plan.tensor_size * plan.pipeline_size > 1) {
    RefuseFormat(where, "fp32_masters", first, "dialect ddp alone",
                 "other dialects keep a unit in one dtype");
  }
  if (job.precision.master != DType::kBf16 || job.precision.param != DType::kBf16 ||
      job.optimizer.matrices != MatrixRule::kNone) {
    RefuseFormat(where, "fp32_masters", first, "masters and compute in bf16, without matrices",
                 "the others are in 16 bits");
  }
  for (const std::string& glob : job.fp32_masters) {
    if (NoneOf(model.params,
               [&](const Parameter& param) { return MatchesGlob(glob, param.fqn); })) {
      RefuseFormat(where, "fp32_masters", glob, "names of parameters of " + model.name, "");
    }
  }
  for (const ModelOp& op : model.ops) {
    for (const ParamId p : op.params) {
      const Parameter& param = model.params[p.value];
      const Parameter& other = model.params[op.params[0].value];
      if (param.trainable && other.trainable && IsWide(job, param) != IsWide(job, other)) {
        RefuseFormat(where, "fp32_masters", first, "all parameters of an op or none",
                     Quoted(param.fqn) + " and " + Quoted(other.fqn) + " differ");
      }
    }
  }
}

}  // namespace

void CheckFormats(const Model& model, const Job& job, const Plan& plan, const std::string& where) {
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  const std::string_view frozen = NameIn(kFrozenFormatNames, job.frozen_format);
  if (job.frozen_format != FrozenFormat::kMaster && !IsTorch(plan.dialect)) {
    RefuseFormat(where, "frozen_format", frozen, "dialect ddp, fsdp1 or fsdp2",
                 "dialect " + std::string(NameOf(plan.dialect)) + " keeps a unit in one dtype");
  }
  const bool is_nf4 =
      job.frozen_format == FrozenFormat::kNf4 || job.frozen_format == FrozenFormat::kNf4Double;
  if (job.frozen_format > FrozenFormat::kParam && !is_nf4 && !is_ddp) {
    RefuseFormat(where, "frozen_format", frozen, "dialect ddp",
                 "only 4-bit weights of bitsandbytes are sharded");
  }
  const bool is_flat = !plan.use_orig_params;
  if (plan.dialect == Dialect::kFsdp1 && (is_flat || job.frozen_format != FrozenFormat::kMaster)) {
    CheckUniformUnits(
        model, plan, where,
        is_flat ? "with use_orig_params false" : "with frozen_format " + std::string(frozen));
  }
  const bool learns_all = AllOf(model.params, &Parameter::trainable);
  if (job.frozen_format != FrozenFormat::kMaster && learns_all) {
    RefuseFormat(where, "frozen_format", frozen, "frozen parameters, or lora_rank",
                 "every parameter learns");
  }
  if (job.lora_magnitudes && plan.dialect != Dialect::kFsdp2 && plan.dialect != Dialect::kZero1 &&
      plan.dialect != Dialect::kZero2 && !is_ddp) {
    RefuseFormat(where, "lora_magnitudes", "true", "dialect ddp, fsdp2, zero1 or zero2",
                 "PEFT's DoRA gathers units of FSDP1 and ZeRO-3 once more for its norms");
  }
  if (!job.lora_saved.empty() && is_ddp && job.frozen_format != FrozenFormat::kMaster &&
      job.precision.master != job.precision.param) {
    RefuseFormat(where, "lora_saved", job.lora_saved.front(), "masters in the dtype of compute",
                 "PEFT leaves whole modules as they are loaded, and makes fp32 of adapters");
  }
  if (job.quantized_experts && job.frozen_format <= FrozenFormat::kParam) {
    RefuseFormat(where, "frozen_format", frozen, "a format of 8 or 4 bits with quantized_experts",
                 "");
  }
  if (job.quantized_experts && !RecomputesExperts(model, plan)) {
    RefuseFormat(where, "quantized_experts", "true", "a fully recomputed region around all experts",
                 "their copies in 16 bits are kept for backward otherwise");
  }
  CheckWide(model, job, plan, where);
  CheckUpdateFormat(job, plan, where);
}

// torchao 0.18 and torch 2.13: FSDP2 alone asks a weight for what it gathers, reshards it to no
// group, and finds no scale behind a copy from the host. Our executor gathers no fp8.
void CheckFp8Gathers(const KernelSetOptions& kernels, const Job& job, const Plan& plan) {
  const bool to_group = AnyOf(plan.units, [](const UnitPlan& unit) {
    return unit.reshard.kind == Reshard::Kind::kToGroup;
  });
  if (GathersFp8(kernels.fp8) &&
      (plan.dialect != Dialect::kFsdp2 || kernels.host_kernels || kernels.cuda_kernels ||
       to_group || plan.pipeline_size > 1 || plan.tensor_size > 1 || plan.offload.parameters ||
       job.frozen_format != FrozenFormat::kMaster)) {
    throw InputError("kernel set: fp8", Quoted(NameIn(kFp8Names, kernels.fp8)), "per_tensor",
                     "fsdp2 alone gathers fp8: with PyTorch's kernels, shards and replicas, no "
                     "groups, parameters on the host or formats of frozen weights");
  }
}

void CheckFullPrecision(const Model& model, const Plan& plan, const std::string& where) {
  const auto has_any = [](const UnitPlan& unit) { return unit.full_precision; };
  if (NoneOf(plan.units, has_any)) {
    return;
  }
  const std::vector<ResolvedUnit> units = ResolveUnits(model, plan, where);
  for (std::size_t u = 0; u < units.size(); ++u) {
    if (!units[u].full_precision) {
      continue;
    }
    const std::string field = UnitField(where, u, "full_precision");
    if (plan.dialect == Dialect::kDdp || IsZero(plan.dialect)) {
      throw InputError(field, "true", "false",
                       plan.dialect == Dialect::kDdp
                           ? "dialect ddp has no units; autocast leaves batch norms alone"
                           : "DeepSpeed casts the whole module");
    }
    for (const ParamId id : units[u].params) {
      if (!model.params[id.value].full_precision) {
        throw InputError(field, "true for " + Quoted(model.params[id.value].fqn),
                         "parameters that the model marks full_precision, and no others",
                         "give its module another unit");
      }
    }
  }
}

void CheckMatrices(const Job& job, const Plan& plan, const std::string& where) {
  if (job.optimizer.matrices != MatrixRule::kNone && plan.dialect != Dialect::kDdp) {
    throw InputError(where,
                     "a job whose optimizer updates matrices by " +
                         std::string(NameIn(kMatrixRuleNames, job.optimizer.matrices)) +
                         " in a plan of dialect " + std::string(NameOf(plan.dialect)),
                     "dialect ddp, or matrices none");
  }
}

}  // namespace shardwright::internal
