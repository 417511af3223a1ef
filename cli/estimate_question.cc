#include "cli/estimate_question.h"

#include <array>

#include "analysis/estimate.h"
#include "cli/flow.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"

namespace shardwright {
namespace {

constexpr std::array<FlagRow, 21> kEstimateFlags = {{
    {"--nodes", "N", "nodes in use"},
    {"--seq", "N", "tokens per sample (default: the model's, at most 2048)"},
    {"--tokens", "N", "tokens (images) of the whole run (default 1e9)"},
    {"--deadline", "TIME", "the fewest nodes that end the run in that time, such as '30 days'"},
    {"--solve", "seq|micro-batch|gpus|lora-rank",
     "the longest sequence, largest micro-batch, fewest GPUs or highest rank that fits"},
    {"--price", "X", "of one GPU-hour, in your currency: the answer has the cost, too"},
    {"--global-batch", "N", "samples per step over all ranks (default: ranks x micro-batch)"},
    {"--micro-batch", "N", "samples per rank and pass (default: the fastest that fits)"},
    {"--offload", "LIST", "none, parameters or activations, as of plan (default: what it takes)"},
    {"--attention", "NAME", "attention's kernels, as of plan (default: the stack's)"},
    {"--precision", "NAME",
     "bf16-mixed, fp16-mixed, fp32, bf16, or master/param/reduce, with +fp8 or +fp8-rowwise as of "
     "plan (default bf16-mixed; with LoRA bf16)"},
    {"--optimizer", "NAME[:IMPL]", "as of plan (default adamw:foreach)"},
    {"--mode", "NAME", "train, or pairs of answers by dpo, dpo_precomputed, orpo or reward"},
    {"--lora-rank", "N", "rank of LoRA adapters; everything else is frozen"},
    {"--lora-targets", "GLOBS",
     "linear modules that get adapters (default: those that PEFT takes, such as q_proj,v_proj)"},
    {"--frozen", "GLOBS", "parameters without gradient, such as 'model.embed_tokens.*'"},
    {"--kernel-set", "NAME", "software stack (default torch-eager)"},
    {"--loss-chunks", "N", "head and loss in N chunks, as of plan"},
    {"--profile", "NAME|FILE", "measured efficiencies (default: by GPU and kernel set)",
     FileRole::kRead},
    {"--memory-margin,--mem-margin", "X",
     "fraction of device memory to leave free (default: the error of the prediction of memory)"},
    {"--allocator", "CONF", "settings of PyTorch's caching allocator, as of plan (default none)"},
}};

constexpr double kMostPrice = 1e6;

// NICs of nodes of which a description says nothing: one per GPU as makers' boxes have them.
const char* UsualNic(const std::string& architecture) {
  if (architecture == "ampere") {
    return "200 Gbit/s";
  }
  return architecture == "hopper" || architecture == "blackwell" || architecture == "cdna3" ||
                 architecture == "cdna4"
             ? "400 Gbit/s"
             : "100 Gbit/s";
}

// "2x8 H100" says nothing of the network between its nodes.
void AssumeNetwork(Question& question) {
  PlanOptions& options = question.options;
  try {
    (void)LoadCluster(options.cluster, options.nodes);
  } catch (const InputError&) {
    std::optional<Cluster> node;
    std::string with_nics = options.cluster;
    try {
      node = LoadCluster(options.cluster, 1);
      with_nics +=
          ", nic " + std::to_string(node->gpus_per_node) + "x" + UsualNic(node->gpu.architecture);
      (void)LoadCluster(with_nics, options.nodes);
    } catch (const InputError&) {
      node.reset();  // something else is wrong, of which the first error tells
    }
    if (!node) {
      throw;
    }
    options.cluster = with_nics;
    question.assumed.push_back("network: " + std::string(UsualNic(node->gpu.architecture)) +
                               " per GPU; a cluster such as \"" + with_nics + "\" says it");
  }
}

// Adds to the description of the cluster. False: it is no description, and stays as it is.
bool Describe(const std::string& more, PlanOptions& options) {
  try {
    (void)LoadCluster(options.cluster + more, options.nodes, options.gpus);
  } catch (const InputError&) {
    return false;
  }
  options.cluster += more;
  return true;
}

// Nodes of which nobody says it have as much memory as their GPUs twice, and 64 GiB per GPU: what
// clouds rent, and less than makers' boxes. NICs matter where more nodes would help.
void AssumeNode(Question& question) {
  constexpr Bytes kLeast(std::int64_t{64} << 30);
  PlanOptions& options = question.options;
  question.cluster_as_asked = options.cluster;
  const Cluster cluster = LoadCluster(options.cluster, options.nodes, options.gpus);
  if (cluster.node.host_memory == Bytes(0)) {
    const Bytes memory = std::max(cluster.gpu.memory.value * 2, kLeast) * cluster.gpus_per_node;
    const std::string host = ", host " + FormatExact(memory);
    question.usual_host = Describe(host, options) ? host : "";
  }
  if (cluster.node_count == 1) {
    Describe(
        ", nic " + std::to_string(cluster.gpus_per_node) + "x" + UsualNic(cluster.gpu.architecture),
        options);
  }
}

// What is said where nobody does: with LoRA 16 bits for all, and fp16 where the GPU has no bf16.
void AssumePrecision(Question& question) {
  PlanOptions& options = question.options;
  if (options.has_precision) {
    return;
  }
  const bool has_lora = options.job.lora_rank > 0;
  if (has_lora) {
    options.job.precision = {DType::kBf16, DType::kBf16, DType::kBf16};
  }
  const GpuSpec gpu = LoadCluster(options.cluster, options.nodes, options.gpus).gpu;
  const bool is_fp16 = UsesFp16(options, gpu);
  if (has_lora || is_fp16) {
    question.assumed.push_back(std::string("precision: ") + (is_fp16 ? "fp16" : "bf16") +
                               (has_lora ? ", weights and adapters" : "-mixed") +
                               (is_fp16 ? ", since " + gpu.name + " multiplies no bf16" : "") +
                               "; --precision");
  }
}

void AssumeLora(Question& question) {
  PlanOptions& options = question.options;
  if (options.job.lora_rank == 0) {
    return;
  }
  if (!options.job.lora_targets.empty() && options.job.lora_targets.front() != "all-linear") {
    return;
  }
  options.job.lora_targets = UsualLoraTargets(options);
  question.assumed.push_back("adapters: on " + Listed(options.job.lora_targets, {}, ",") +
                             "; --lora-targets");
}

}  // namespace

std::span<const FlagRow> EstimateFlags() {
  return kEstimateFlags;
}

Question ReadQuestion(const Arguments& arguments) {
  Arguments as_plan = arguments;  // under the names that `plan` has for them
  as_plan.text["--model"] = arguments.Get("MODEL").text;
  as_plan.text["--cluster"] = arguments.Get("CLUSTER").text;
  Question question;
  question.options = ReadPlanOptions(as_plan);
  question.options.search = true;
  question.options.has_margin = arguments.Get("--memory-margin").is_given();
  arguments.Set("--tokens", question.tokens,
                [](const Flag& flag) { return ReadWholeNumber(flag, 1); });
  arguments.Set("--price", question.price,
                [](const Flag& flag) { return ReadPositive(flag, kMostPrice); });
  question.given.fixed.micro_batch = arguments.Get("--micro-batch").is_given();
  question.given.fixed.offload = arguments.Get("--offload").is_given();
  question.given.base.micro_batch = question.options.plan.micro_batch;
  question.given.base.offload = question.options.plan.offload;
  AssumeNetwork(question);
  AssumeNode(question);
  AssumePrecision(question);
  AssumeLora(question);
  return question;
}

}  // namespace shardwright
