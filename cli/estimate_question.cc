#include "cli/estimate_question.h"

#include "cli/flow.h"
#include "cli/lengths_flag.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"

namespace shardwright {
namespace {

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

// What is said where nobody does: with LoRA 16 bits for all, but masters of adapters above a
// quantized base; and fp16 where the GPU has no bf16.
void AssumePrecision(Question& question) {
  PlanOptions& options = question.options;
  if (options.has_precision) {
    return;
  }
  const bool has_lora =
      options.job.lora_rank > 0 && options.job.frozen_format == FrozenFormat::kMaster;
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

Question ReadQuestion(const Arguments& arguments) {
  Arguments as_plan = WithLongest(arguments);  // under the names that `plan` has for them
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
