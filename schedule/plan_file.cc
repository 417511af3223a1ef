#include "schedule/plan_file.h"

#include <optional>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/json.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/cut_context.h"
#include "models/cut_experts.h"
#include "models/cut_tensor.h"
#include "models/loader.h"
#include "models/trainable.h"
#include "schedule/internal/check_plan.h"
#include "schedule/internal/plan_json.h"
#include "topologies/check_network.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

// The newest version of the format, and the only one so far.
constexpr std::int64_t kVersion = 1;

void CheckHeader(const JsonValue& json) {
  (void)json.At("format").AsChoice({"shardwright-plan"});
  const JsonValue version = json.At("version");
  if (version.AsInt() > kVersion) {
    throw version.Error("version " + std::to_string(kVersion),
                        "a newer Shardwright wrote this file");
  }
  (void)version.AsInt(kVersion, kVersion);
}

// Compares the "hash" that the file gives for a thing that ships with us with what we have.
void CheckHash(const JsonValue& json, std::uint64_t hash, const std::string& what) {
  const std::optional<JsonValue> given = json.Find("hash");
  if (given && given->AsString() != HashText(hash)) {
    throw given->Error(Quoted(HashText(hash)),
                       what +
                           " has changed since this plan was made: make it again, or delete the "
                           "hash to accept the change");
  }
}

// The sub-document under "json", as text for the parsers of models, clusters and profiles.
std::string Embedded(const nlohmann::ordered_json& document, const char* part) {
  return document.at(part).at("json").dump();
}

TrainableSpec TrainableOf(const Job& job) {
  return {.frozen = job.frozen,
          .lora_rank = job.lora_rank,
          .lora_alpha = job.lora_alpha,
          .lora_targets = job.lora_targets,
          .lora_dropout = job.lora_dropout,
          .lora_saved = job.lora_saved,
          .lora_magnitudes = job.lora_magnitudes,
          .trains_by = job.trains_by,
          .rollout = job.rollout};
}

void ReadModel(const JsonValue& json, const nlohmann::ordered_json& document, const Path& job_path,
               PlanFile& file) {
  json.AllowOnly({"name", "json", "hash"});
  const JsonValue name = json.At("name");
  LoadOptions options;
  options.sequence_length = file.job.sequence_length;
  if (const std::optional<JsonValue> embedded = json.Find("json")) {
    file.model = {ModelFromJson(*embedded, name.AsString(), options), Embedded(document, "model")};
  } else {
    const std::vector<std::string> names = ZooNames();
    if (!std::binary_search(names.begin(), names.end(), name.AsString())) {
      throw name.Error("the name of a zoo model, or a model under \"json\"",
                       DidYouMean(name.AsString(), names));
    }
    file.model = {LoadModel(name.AsString(), options)};
  }
  file.model.hash = HashModel(file.model);
  CheckHash(json, file.model.hash, "model " + Quoted(name.AsString()));
  ApplyTrainable(file.model, TrainableOf(file.job), job_path);
}

void ReadCluster(const JsonValue& json, const nlohmann::ordered_json& document, PlanFile& file) {
  json.AllowOnly(
      {"name", "nodes", "gpus_per_node", "machine_cores", "rank_threads", "json", "hash"});
  if (json.Find("json")) {
    const std::string name = json.At("json").path().str();
    file.cluster = ParseCluster(Embedded(document, "cluster"), name);
  } else {
    const std::string name = json.At("name").AsString();
    const std::vector<std::string> names = ListClusterNames();
    if (!IsIn(names, name)) {
      throw json.At("name").Error("a cluster of the catalog", DidYouMean(name, names));
    }
    file.cluster = LoadCluster(name, json.At("nodes").AsInt(1), json.At("gpus_per_node").AsInt(1));
    // Those of the machine where the plan was made, not of this one.
    const auto cores = json.Find("machine_cores");
    file.cluster.machine_cores = cores ? ReadCores(*cores) : 0;
    const auto threads = json.Find("rank_threads");
    file.cluster.rank_threads = threads ? ReadThreads(*threads) : 0;
  }
  CheckHash(json, Fnv1a64(ClusterJson(file.cluster)), "cluster " + Quoted(file.cluster.name));
}

void ReadProfile(const JsonValue& json, const nlohmann::ordered_json& document, PlanFile& file) {
  json.AllowOnly({"name", "json", "hash"});
  if (json.Find("json")) {
    file.profile = ParseProfile(Embedded(document, "profile"), json.At("json").path().str());
  } else {
    const JsonValue name = json.At("name");
    const std::vector<std::string> names = ListProfiles();
    if (!IsIn(names, name.AsString())) {
      throw name.Error("a profile that ships", DidYouMean(name.AsString(), names));
    }
    file.profile = LoadProfile(name.AsString());
  }
  CheckHash(json, Fnv1a64(ProfileJson(file.profile)), "profile " + Quoted(file.profile.name));
}

}  // namespace

LoadedModel LoadModelForJob(const std::string& spec, Job& job, const Path& where,
                            const std::string& text) {
  const LoadOptions options{.sequence_length = job.sequence_length};
  LoadedModel loaded{text.empty() ? LoadModel(spec, options)
                                  : ModelFromJson(JsonValue::Parse(text, spec), spec, options)};
  if (job.sequence_length == 0) {
    job.sequence_length = std::max<std::int64_t>(1, loaded.sequence_length);
  }
  const std::string file = text.empty() ? ModelFile(spec) : "";
  loaded.json = file.empty() ? text : ReadTextFile(file);
  loaded.hash = HashModel(loaded);
  ApplyTrainable(loaded, TrainableOf(job), where);
  if (job.mode == JobMode::kTrain && !job.frozen.empty() &&
      CountParameters(loaded, /*trainable_only=*/true) == 0) {
    throw InputError(where.Field("frozen").str(), "every parameter",
                     "some that are trained, or mode forward");
  }
  return loaded;
}

void CutForPlan(Model& model, const Job& job, const Plan& plan, const CutNames& names) {
  CutExperts(model, plan.expert_size, names.experts);
  const auto check = [&](std::int64_t ranks, const std::string& where, const char* what) {
    if (ranks > 1 && job.trains_by != TrainsBy::kOwn) {
      throw InputError(
          where, std::to_string(ranks),
          "1: a job that compares answers is not cut by " + std::string(what) + " so far");
    }
  };
  check(plan.tensor_size, names.tensor, "layers");
  check(plan.context_size, names.context, "tokens");
  if (plan.tensor_size > 1 && plan.expert_size > 1) {
    throw InputError(names.tensor, std::to_string(plan.tensor_size),
                     "1 beside experts that ranks share out");
  }
  CutContext(model, plan.context_size, plan.context_method, names.context);
  CutTensor(model, plan.tensor_size, names.tensor);
}

PlanFile ParsePlanFile(std::string_view text, const std::string& name) {
  const JsonValue json = JsonValue::Parse(text, name);
  CheckHeader(json);
  json.AllowOnly({"format", "version", "imported_from", "model", "kernel_set", "cluster", "profile",
                  "job", "plan"});
  // Syntax is checked above; this second reading keeps the order of embedded documents.
  const nlohmann::ordered_json document = ParseOrdered(text, name);
  PlanFile file;
  file.job = internal::ReadJob(json.At("job"));
  file.plan = internal::ReadPlan(json.At("plan"));
  file.kernels = internal::ReadKernelSet(json.At("kernel_set"));
  ReadModel(json.At("model"), document, json.At("job").path(), file);
  const Path plan_path = json.At("plan").path();
  CutForPlan(file.model, file.job, file.plan,
             {plan_path.Field("expert_size").str(), plan_path.Field("tensor_size").str(),
              plan_path.Field("context_size").str()});
  ReadCluster(json.At("cluster"), document, file);
  ReadProfile(json.At("profile"), document, file);
  CheckPlan(file, file.plan, json.At("plan").path().str());
  return file;
}

std::string ImportedFrom(std::string_view text, const std::string& name) {
  const auto note = JsonValue::Parse(text, name).Find("imported_from");
  return note ? note->AsString() : "";
}

void CheckFp8(const Problem& problem) {
  // The host rounds operands and multiplies them as it always does.
  if (problem.kernels.fp8 == Fp8Products::kNone || problem.kernels.host_kernels) {
    return;
  }
  const GpuSpec& gpu = problem.cluster.gpu;
  constexpr auto kFp8 = MathType::kFp8;
  if (!PeakFlops(gpu, kFp8)) {
    throw InputError("products in fp8", "GPU " + gpu.name + ", whose data sheet has no fp8 rate",
                     "one that multiplies fp8, or a precision without it");
  }
  if (!problem.profile.compute.gemm[static_cast<std::size_t>(kFp8)].has_value()) {
    throw InputError("products in fp8",
                     "profile " + problem.profile.name + " without compute.gemm.fp8",
                     "a profile that says what fp8 products reach");
  }
}

void CheckPlan(const Problem& problem, const Plan& plan, const std::string& where) {
  CheckNetwork(problem.cluster, problem.profile);
  CheckFp8(problem);
  internal::CheckFp8Gathers(problem.kernels, problem.job, plan);
  ValidatePlan(problem.model, problem.job, plan, where);
  (void)ResolveUnits(problem.model, plan, where);
  const std::int64_t ranks = MeshOf(plan).RankCount();
  if (ranks != problem.cluster.RankCount()) {
    throw InputError(
        where,
        "shard_size " + std::to_string(plan.shard_size) + " x replicate_size " +
            std::to_string(plan.replicate_size) +
            (plan.tensor_size > 1 ? " x tensor_size " + std::to_string(plan.tensor_size) : "") +
            (plan.pipeline_size > 1 ? " x pipeline_size " + std::to_string(plan.pipeline_size)
                                    : "") +
            " = " + std::to_string(ranks) + " ranks",
        std::to_string(problem.cluster.RankCount()) + ", the GPUs of " +
            std::to_string(problem.cluster.node_count) + " x " + problem.cluster.name);
  }
}

}  // namespace shardwright
