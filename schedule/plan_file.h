#pragma once

// Plan files: everything a simulation or a run needs, in one versioned JSON document
// (docs/plan_file.md). What ships with Shardwright is named, with a hash of its content; what the
// user brought is embedded.

#include <cstdint>
#include <string>
#include <string_view>

#include "core/error.h"
#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/problem.h"

namespace shardwright {

struct PlanFile : Problem {
  Plan plan;
};

// Loads a model as LoadModel does, freezes and adapts what `job` says, and sets a sequence length
// of 0 to what the model then has (1 for a model without sequences). `where` names the source of
// the job in errors. `text`: a config.json or model.json that stands in no file, of which `spec` is
// the name. Throws InputError.
[[nodiscard]] LoadedModel LoadModelForJob(const std::string& spec, Job& job, const Path& where,
                                          const std::string& text = "");

// The part of the model that the first rank of `plan` has (CutExperts, CutTensor,
// CutContext). The names say where the ranks are from: "--shard: ep". Throws InputError.
struct CutNames {
  std::string experts, tensor, context;
};
void CutForPlan(Model& model, const Job& job, const Plan& plan, const CutNames& names);

// The document as text: keys in a fixed order, so that equal plans give equal bytes. Ends with a
// newline.
[[nodiscard]] std::string PlanFileJson(const PlanFile& file);
// The same with a note beside the plan: the target of `emit` that stands for the framework of the
// run that was imported. Empty: no note.
[[nodiscard]] std::string PlanFileJson(const PlanFile& file, std::string_view imported_from);
// That note, of the text of a plan file.
[[nodiscard]] std::string ImportedFrom(std::string_view text, const std::string& name);

// Reads a plan from text; `name` is the file in error messages. Loads model, cluster and profile
// and checks everything: hashes of named things, ValidatePlan, ResolveUnits, and that the plan uses
// all ranks of the cluster. Throws InputError.
[[nodiscard]] PlanFile ParsePlanFile(std::string_view text, const std::string& name);

// The same checks for a plan made in memory; `where` names it in errors.
void CheckPlan(const Problem& problem, const Plan& plan, const std::string& where);

// Throws InputError for products in fp8 on a GPU, or with a profile, that has no rate of them.
void CheckFp8(const Problem& problem);

// 64-bit FNV-1a (offset basis 0xcbf29ce484222325, prime 0x100000001b3): the content hash of plan
// files. It finds accidental changes, not attacks.
[[nodiscard]] std::uint64_t Fnv1a64(std::string_view text);

// Fnv1a64 over everything in `model` that a program depends on: module tree, parameters, tensors,
// ops and their specs.
[[nodiscard]] std::uint64_t HashModel(const Model& model);

// How hashes are written: "fnv1a64:0123456789abcdef".
[[nodiscard]] std::string HashText(std::uint64_t hash);

}  // namespace shardwright
