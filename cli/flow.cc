#include "cli/flow.h"

#include <cmath>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "analysis/estimate.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "models/loader.h"
#include "models/trainable.h"
#include "planner/search.h"
#include "planner/space.h"
#include "planner/warnings.h"
#include "schedule/wrap.h"
#include "topologies/check_network.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

void SetBatch(const PlanOptions& options, std::int64_t ranks, Job& job, Plan& plan) {
  const std::int64_t samples = ranks * plan.micro_batch;  // both at most 2^24
  plan.accumulation = options.accumulation > 0 ? options.accumulation : 1;
  job.global_batch = options.global_batch;
  if (job.global_batch == 0) {
    job.global_batch = samples * plan.accumulation;
    return;
  }
  if (options.accumulation == 0 && job.global_batch % samples == 0) {
    plan.accumulation = job.global_batch / samples;
  }
  if (samples * plan.accumulation != job.global_batch) {
    throw InputError(
        "--global-batch: got " + std::to_string(job.global_batch) + ", expected a multiple of " +
        std::to_string(ranks) + " ranks x micro-batch " + std::to_string(plan.micro_batch) +
        (options.accumulation > 0 ? " x accumulation " + std::to_string(options.accumulation)
                                  : ""));
  }
}

}  // namespace

// W and R: what is given must divide the ranks; what is not follows.
void SetMesh(const PlanOptions& options, std::int64_t ranks, Plan& plan) {
  const bool is_free = options.shard_size == 0 && options.replicate_size == 0;
  const bool is_ddp = plan.dialect == Dialect::kDdp;
  Mesh given = is_free && is_ddp ? Mesh{{0, 1}} : MeshOf(options);
  given.tensor = options.plan.tensor_size;
  given.pipeline = options.plan.pipeline_size;
  const Mesh mesh = MeshOver(ranks, given);
  plan.shard_size = mesh.Along(Axis::kShard);
  plan.replicate_size = mesh.Along(Axis::kReplicate);
  if (mesh.RankCount() == ranks) {
    return;
  }
  const std::string shard = std::to_string(options.shard_size);
  const std::string replicate = std::to_string(options.replicate_size);
  // What ranks that cut layers, and other stages, leave.
  const Mesh left =
      MeshOver(ranks, {.size = {1, 0}, .tensor = given.tensor, .pipeline = given.pipeline});
  const std::int64_t cut = left.tensor * left.pipeline;
  const std::string expected = std::to_string(ranks) + " ranks";
  if (left.RankCount() != ranks) {
    throw InputError("--shard: tp x pp", std::to_string(cut), "a divisor of the " + expected);
  }
  const std::string among =
      cut == 1 ? expected
               : std::to_string(left.CopyCount()) + " that tp and pp leave of the " + expected;
  if (options.shard_size == 0 || options.replicate_size == 0) {
    throw InputError(
        (options.shard_size == 0 ? "--replicate: got " + replicate : "--shard: got " + shard) +
        ", expected a divisor of the " + among);
  }
  throw InputError("--shard " + shard + " --replicate " + replicate +
                   ": got a product other than the " + among + (cut == 1 ? " of the cluster" : ""));
}

namespace {

// Of each stretch of blocks the part `part`, evenly spread: block i when floor((i + 1) * part) >
// floor(i * part), as fms-fsdp and torchtitan choose them.
void KeepPart(double part, std::vector<RecomputeRegion>& regions) {
  std::vector<RecomputeRegion> kept;
  for (std::size_t i = 0; i < regions.size(); ++i) {
    // A small surplus, so that 3 * (1 / 3) counts as 1.
    constexpr double kRounding = 1e-9;
    const auto index = static_cast<double>(i);
    if (std::floor((index + 1) * part + kRounding) > std::floor(index * part + kRounding)) {
      kept.push_back(regions[i]);
    }
  }
  regions = kept;
}

}  // namespace

// Units and recomputed regions.
void SetUnits(const PlanOptions& options, const Model& model, const Job& job, Plan& plan) {
  std::string_view rule = DefaultWrap(plan.dialect);
  if (rule == "block" && BlocksOf(model).empty()) {
    rule = "root";
  }
  const WrapSpec wrap = options.wrap ? *options.wrap : ParseWrap(rule, "--wrap");
  plan.units = Wrap(model, wrap, options.reshard, plan.dialect, "--wrap");
  if (wrap.kind != WrapSpec::Kind::kFile) {
    KeepFullPrecision(model, job.precision, plan);
    AddExpertUnits(model, plan.units);
  }
  if (options.recompute) {
    plan.recompute =
        RecomputeBlocks(model, options.recompute_kind, options.keep_every, "--recompute");
    KeepPart(options.recompute_part, plan.recompute);
  }
}

namespace {

// The margin that leaves `limit` of the device; 0: none said.
double MarginOf(Bytes limit, const GpuSpec& gpu, double margin) {
  if (limit == Bytes(0)) {
    return margin;
  }
  const Bytes usable = gpu.usable_memory.value;
  if (limit > usable) {
    throw UsageError("--mem: got " + Format(limit) + ", expected at most the " + Format(usable) +
                     " usable on " + gpu.name);
  }
  return 1.0 - static_cast<double>(limit.value) / static_cast<double>(usable.value);
}

}  // namespace

const char* UsualKernelSet(const GpuSpec& gpu) {
  return gpu.architecture == "host" ? "shardwright-host" : "torch-eager";
}

void SetAttention(const PlanOptions& options, PlanFile& file) {
  const GpuSpec& gpu = file.cluster.gpu;
  if (!options.attention) {
    if (options.stack_attention && gpu.vendor == "nvidia") {
      file.kernels.attention = *options.stack_attention;
    }
    return;
  }
  const AttentionImpl attention = *options.attention;
  const bool is_nvidias = attention == AttentionImpl::kCudnn || attention == AttentionImpl::kFlash3;
  const std::string needed = is_nvidias                        ? "nvidia"
                             : attention == AttentionImpl::kCk ? "amd"
                                                               : gpu.vendor;
  if (gpu.vendor != needed) {
    throw UsageError("--attention: these kernels run on " +
                     std::string(is_nvidias ? "NVIDIA's" : "AMD's") + " GPUs, and " + gpu.name +
                     " is none");
  }
  file.kernels.attention = attention;
}

void SetLossChunks(const PlanOptions& options, PlanFile& file) {
  if (options.loss_chunks == 0) {
    return;
  }
  const Model& model = file.model;
  std::size_t i = 0;
  while (i < model.ops.size() && !IsLinearLoss(model, i)) {
    ++i;
  }
  if (i == model.ops.size() && options.loss_chunks > 1) {
    throw UsageError("--loss-chunks: " + model.name +
                     " has no linear layer right before a cross-entropy");
  }
  file.kernels = WithLossChunks(std::move(file.kernels), options.loss_chunks);
}

bool UsesFp16(const PlanOptions& options, const GpuSpec& gpu) {
  return !options.has_precision && options.job.precision.param == DType::kBf16 &&
         !PeakFlops(gpu, MathType::kBf16) && PeakFlops(gpu, MathType::kFp16);
}

std::vector<std::string> UsualLoraTargets(const PlanOptions& options) {
  PlanOptions whole = options;
  whole.job.lora_rank = 0;
  whole.job.lora_targets.clear();
  whole.job.lora_saved.clear();
  whole.job.lora_magnitudes = false;
  whole.job.lora_alpha = whole.job.lora_dropout = 0.0;
  const Model model = MakeJobFile(whole).model;
  if (!options.job.lora_targets.empty()) {
    return MatchedTargets(model, options.job.lora_targets, "--lora-targets");
  }
  std::vector<std::string> targets = DefaultLoraTargets(model);
  if (targets.empty()) {
    throw UsageError(
        "--lora-rank: needs --lora-targets for this model, whose modules have none of "
        "the names that PEFT adapts by default");
  }
  return targets;
}

void WarnOf(const PlanFile& file) {
  for (const std::string& warning : WarningsOf(file)) {
    Warn(warning);
  }
}

PlanFile MakeJobFile(const PlanOptions& options) {
  PlanFile file;
  file.job = options.job;
  std::vector<std::string>& targets = file.job.lora_targets;
  const bool names_all = IsIn(targets, "all-linear");
  if (file.job.lora_rank > 0 && (targets.empty() || names_all)) {
    targets = UsualLoraTargets(options);
    Say("note: adapters on " + Listed(file.job.lora_targets, {}, ",") + "; --lora-targets");
  }
  file.cluster = LoadCluster(options.cluster, options.nodes, options.gpus);
  if (UsesFp16(options, file.cluster.gpu)) {
    Precision& precision = file.job.precision;
    for (DType* dtype : {&precision.master, &precision.param, &precision.reduce}) {
      *dtype = *dtype == DType::kBf16 ? DType::kFp16 : *dtype;
    }
  }
  file.job.memory_margin = MarginOf(options.memory_limit, file.cluster.gpu, file.job.memory_margin);
  file.kernels = FindKernelSet(
      options.kernel_set.empty() ? UsualKernelSet(file.cluster.gpu) : options.kernel_set,
      "--kernel-set");
  SetAttention(options, file);
  file.kernels.fp8 = options.fp8.value_or(file.kernels.fp8);
  file.profile = options.profile.empty() ? DefaultProfile(file.cluster.gpu, file.kernels.name)
                                         : LoadProfile(options.profile);
  CheckNetwork(file.cluster, file.profile);
  CheckFp8(file);
  if (options.search && !options.has_margin) {
    file.job.memory_margin = DefaultMargin(file.cluster, file.profile);
  }
  file.job.global_batch = options.global_batch > 0
                              ? options.global_batch
                              : DataRanks(file.cluster, MeshOf(options.plan)) *
                                    options.plan.micro_batch *
                                    std::max<std::int64_t>(options.accumulation, 1);
  file.model = LoadModelForJob(options.model, file.job, Path("plan"), options.model_json);
  CutForPlan(file.model, file.job, options.plan, {"--shard: ep", "--shard: tp", "--shard: cp"});
  if (options.job.sequence_length > 0 && file.model.sequence_length == 0) {
    throw InputError("--seq", std::to_string(options.job.sequence_length),
                     "no such flag with " + file.model.name + ", which has no sequences");
  }
  SetLossChunks(options, file);
  return file;
}

std::string NoMatrixUnits(const GpuSpec& gpu) {
  return gpu.name + " has no matrix units for the compute dtype; fp32 rates are used";
}

PlanFile MakePlanFile(const PlanOptions& options) {
  PlanFile file = MakeJobFile(options);
  file.plan = options.plan;
  const std::int64_t ranks = file.cluster.RankCount();
  SetMesh(options, ranks, file.plan);
  SetBatch(options, MeshOf(file.plan).DataCount(), file.job, file.plan);
  SetUnits(options, file.model, file.job, file.plan);
  CheckPlan(file, file.plan, "plan");
  return file;
}

PlanFile ReadPlanFile(const std::string& file, const Streams& streams) {
  const std::vector<std::string> zoo = ZooNames();
  if (IsIn(zoo, file) && !Exists(file)) {
    throw UsageError("\"" + file +
                     "\" is a model, and a plan is needed: shardwright plan --model " + file +
                     " --cluster 8xH100 -o plan.json writes one");
  }
  return file == "-" ? ParsePlanFile(streams.read(), streams.source)
                     : ParsePlanFile(ReadTextFile(file), file);
}

std::string DescribedCluster(const Cluster& cluster) {
  const std::int64_t nodes = cluster.node_count;
  return std::to_string(cluster.RankCount()) + " x " + PrintableLine(cluster.gpu.name) +
         (nodes > 1 ? ", " + std::to_string(nodes) + " nodes" : "");
}

std::string MeshText(const Plan& plan) {
  return "shard " + WithCommas(plan.shard_size) + " x replicate " +
         WithCommas(plan.replicate_size) +
         (plan.tensor_size == 1 ? "" : " x tensor " + WithCommas(plan.tensor_size)) +
         (plan.pipeline_size == 1
              ? ""
              : " x pipeline " + WithCommas(plan.pipeline_size) + " (" +
                    (plan.pipeline_stages > 1 ? WithCommas(plan.pipeline_stages) + " stages each, "
                                              : "") +
                    std::string(NameIn(kPipelineScheduleNames, plan.pipeline_schedule)) +
                    (plan.pipeline_edge_layers == 0 ? ", even)" : ")")) +
         (plan.expert_size == 1
              ? ""
              : ", of which " + WithCommas(plan.expert_size) + " share out the experts") +
         (plan.context_size == 1
              ? ""
              : ", of which " + WithCommas(plan.context_size) + " have a part of the same tokens" +
                    (plan.context_method == ContextMethod::kGather
                         ? ""
                         : " (" + std::string(NameIn(kContextMethodNames, plan.context_method)) +
                               ")"));
}

void AddMesh(const Plan& plan, nlohmann::ordered_json& json) {
  json["dialect"] = NameOf(plan.dialect);
  json["shard_size"] = plan.shard_size;
  json["replicate_size"] = plan.replicate_size;
  const std::pair<const char*, std::int64_t> others[] = {{"expert_size", plan.expert_size},
                                                         {"tensor_size", plan.tensor_size},
                                                         {"context_size", plan.context_size},
                                                         {"pipeline_size", plan.pipeline_size},
                                                         {"pipeline_stages", plan.pipeline_stages}};
  for (const auto& [name, size] : others) {
    if (size > 1) {
      json[name] = size;
    }
  }
  if (plan.pipeline_size > 1) {
    json["pipeline_schedule"] = NameIn(kPipelineScheduleNames, plan.pipeline_schedule);
  }
  json["micro_batch"] = plan.micro_batch;
  json["accumulation"] = plan.accumulation;
}

std::string TitleOf(const PlanFile& file) {
  const Cluster& cluster = file.cluster;
  const std::string where = cluster.name == "inline"
                                ? DescribedCluster(cluster)
                                : std::to_string(cluster.node_count) + " x " +
                                      PrintableLine(cluster.name) + " (" +
                                      std::to_string(cluster.RankCount()) + " GPUs)";
  return PrintableLine(file.model.name) + " on " + where + ", " +
         std::string(NameOf(file.plan.dialect));
}

}  // namespace shardwright
