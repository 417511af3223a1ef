#pragma once

// Job = what the user demands. Plan = what was chosen. A field is in exactly one of the two.
// Lower turns both, with a model and its kernels, into a Program.
//
// schedule/plan_parts.json says each field once: what it means, its type and default, its word and
// range in files. The structs and enumerators here and the lists that plan files are read and
// written by (internal/plan_json.cc) are made from it.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/model.h"
#include "schedule/pipeline.h"
#include "schedule/plan_parts.h"

namespace shardwright {

// Dtypes of what a unit holds: full precision means that the master dtype is gathered, computed
// with and reduced.
[[nodiscard]] constexpr Precision UnitPrecision(const Precision& job, bool full_precision) {
  return full_precision ? Precision{job.master, job.master, job.master} : job;
}

// Is it one of Job::fp32_masters?
[[nodiscard]] bool IsWide(const Job& job, const Parameter& param);

inline constexpr double kMaxLoraAlpha = 1e6;

// As the environment variable has it, "expandable_segments:True,max_split_size_mb:512"; empty for
// the defaults.
[[nodiscard]] std::string AllocatorConf(const AllocatorSettings& settings);

[[nodiscard]] std::string_view NameOf(Dialect dialect);
// zero1, zero2 or zero3.
[[nodiscard]] bool IsZero(Dialect dialect);
// PyTorch's own: fsdp2, fsdp1 or ddp.
[[nodiscard]] bool IsTorch(Dialect dialect);

// Does DDP let parameters be without a gradient?
[[nodiscard]] inline bool FindsUnused(const Plan& plan) {
  return plan.dialect == Dialect::kDdp && (plan.find_unused_parameters || plan.static_graph);
}

[[nodiscard]] inline Pipeline PipelineOf(const Plan& plan) {
  return {plan.pipeline_schedule, plan.pipeline_size, plan.pipeline_stages, plan.accumulation};
}

// How one parameter belongs to one unit of a plan.
struct ResolvedUnit {
  std::string name;
  std::vector<ModuleId> modules;  // roots of the unit's subtrees
  std::vector<ParamId> params;    // storages, in communication order of the plan's dialect
  bool full_precision = false;
  std::uint32_t planned = 0;  // the entry of Plan::units
};

// Of a plan of a ZeRO dialect: gradients are reduce-scattered, not all-reduced.
[[nodiscard]] bool ScattersGradients(const Plan& plan);

// Assigns every parameter storage to exactly one unit: a unit takes what lies below its modules
// and is not taken by a unit further in (fsdp-semantics: inner first). Throws InputError for an
// unknown FQN (with the nearest), a module in two units, a parameter outside all units, tied
// parameters that fall into different units, and unknown prefetch names. `where` names the plan.
// O(modules * depth + params).
[[nodiscard]] std::vector<ResolvedUnit> ResolveUnits(const Model& model, const Plan& plan,
                                                     const std::string& where);

// Checks what Lower relies on: sizes positive, reshard groups divide the shard size, options of
// other dialects not used, W * R * micro_batch * accumulation = global batch. Throws InputError.
void ValidatePlan(const Model& model, const Job& job, const Plan& plan, const std::string& where);

}  // namespace shardwright
