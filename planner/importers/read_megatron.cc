#include "planner/importers/read_megatron.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include "models/loader.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {
namespace {

using Config = nlohmann::ordered_json;

constexpr std::int64_t kLargest = std::int64_t{1} << 24;

bool HasFlag(const JsonValue& root, std::string_view key) {
  const auto value = root.Find(key);
  return value && !value->IsNull() && (!value->IsBool() || value->AsBool());
}

std::int64_t IntAt(const JsonValue& root, std::string_view key, std::int64_t by_default) {
  const auto value = root.Find(key);
  return value && !value->IsNull() ? value->AsInt(0, kLargest) : by_default;
}

std::string TextAt(const JsonValue& root, std::string_view key, std::string_view by_default) {
  const auto value = root.Find(key);
  return value && value->IsString() ? value->AsString() : std::string(by_default);
}

[[noreturn]] void Refuse(const JsonValue& root, const char* key, const std::string& expected) {
  throw root.At(key).Error(expected);
}

// --- the model

// Each number of tokens that the tokenizer has, on each rank of `tp` a multiple of 128.
std::int64_t VocabularyOf(const JsonValue& root, std::vector<Assumption>& assumed) {
  if (const std::int64_t padded = IntAt(root, "padded_vocab_size", 0); padded > 0) {
    return padded;
  }
  std::int64_t words = IntAt(root, "vocab_size", 0);
  if (words == 0) {
    const std::string tokenizer = TextAt(root, "tokenizer_type", "GPT2BPETokenizer");
    const auto known = SettingKeys::Table("megatron_vocabularies").Find(tokenizer);
    const std::string zoo = ZooModelOf(TextAt(root, "tokenizer_model", ""));
    if (!zoo.empty()) {
      words = LoadModel(zoo).params.front().shape.front();
    } else if (known) {
      words = known->AsInt();
    } else {
      throw InputError(root.path().str(), tokenizer + " and no vocab_size",
                       "--vocab-size, since the size of its vocabulary is in another file");
    }
    assumed.push_back(
        {"vocab_size", std::to_string(words) + ", of " + (zoo.empty() ? tokenizer : zoo)});
  }
  const std::int64_t multiple =
      std::max<std::int64_t>(1, IntAt(root, "make_vocab_size_divisible_by", 128)) *
      std::max<std::int64_t>(1, IntAt(root, "tensor_model_parallel_size", 1));
  return (words + multiple - 1) / multiple * multiple;
}

// "([0]*3+[1]*58)": the first three layers are dense; 2: every second layer has experts, the first
// of them with number 0.
void SetSparseLayers(const JsonValue& value, std::int64_t layers, Config& config) {
  if (!value.IsString()) {
    config["sparse_step"] = value.AsInt(1, kLargest);
    return;
  }
  std::string text = value.AsString();
  std::erase_if(text, [](char c) { return c == ' ' || c == '(' || c == ')'; });
  for (std::size_t at = text.find("]+"); at != std::string::npos; at = text.find("]+")) {
    text.insert(at + 1, "*1");
  }
  int dense = 0, sparse = 0, end = 0;
  if (std::sscanf(text.c_str(), "[0]*%5d+[1]*%5d%n", &dense, &sparse, &end) < 2) {
    dense = 0;
    (void)std::sscanf(text.c_str(), "[1]*%5d%n", &sparse, &end);
  }
  if (end != std::ssize(text) || dense + sparse != layers) {
    throw value.Error("a number, or dense layers before all others, such as ([0]*3+[1]*58), " +
                      std::to_string(layers) + " in all");
  }
  config["dense_layers"] = dense;
}

// The arguments as a config.json of type "megatron" or "megatron_latent" (models/model_types.json).
std::string ConfigOf(const JsonValue& root, std::vector<Assumption>& assumed) {
  const bool is_latent = HasFlag(root, "multi_latent_attention");
  if (is_latent && (!HasFlag(root, "swiglu") || !HasFlag(root, "disable_bias_linear") ||
                    TextAt(root, "normalization", "") != "RMSNorm")) {
    Refuse(root, "multi_latent_attention",
           "swiglu, RMSNorm and disable_bias_linear beside it, since other models with latent "
           "attention cannot be predicted");
  }
  Config config = {{"model_type", is_latent ? "megatron_latent" : "megatron"}};
  for (const auto& [key, row] : SettingKeys::Of("megatron").all()) {
    const auto value = root.Find(key);
    if (row.meaning.starts_with("(the model") && value && !value->IsNull()) {
      config[key] = value->IsString() ? Config(value->AsString()) : Config::parse(value->Shown());
    }
  }
  if (HasFlag(root, "num_experts")) {
    config["dense_layers"] = 0;
    if (const auto sparse = root.Find("moe_layer_freq")) {
      SetSparseLayers(*sparse, IntAt(root, "num_layers", 0), config);
    }
  }
  config["vocab_size"] = VocabularyOf(root, assumed);
  return config.dump();
}

// --- the plan

std::int64_t SizeOf(const JsonValue& root, std::string_view axis) {
  return std::max<std::int64_t>(1, IntAt(root, std::string(axis) + "_model_parallel_size", 1));
}

// Of the layers of a stage: 32 layers on 4 stages in parts of 4 are two each.
std::int64_t PartsOf(const JsonValue& root) {
  const std::int64_t layers = IntAt(root, "num_layers", 0), stages = SizeOf(root, "pipeline");
  const std::int64_t rows = IntAt(root, "num_layers_per_virtual_pipeline_stage", 0);
  if (rows > 0 && layers % (rows * stages) != 0) {
    Refuse(root, "num_layers_per_virtual_pipeline_stage",
           "a divisor of the " + std::to_string(layers) + " layers of " + std::to_string(stages) +
               " stages");
  }
  return rows > 0
             ? layers / stages / rows
             : std::max<std::int64_t>(1, IntAt(root, "num_virtual_stages_per_pipeline_rank", 1));
}

// "tp=2,cp=2:ring,ep=8,pp=4x2:even"; the rest of the ranks share the optimizer.
std::string ShardOf(const JsonValue& root) {
  std::string text;
  const auto add = [&](const char* name, std::int64_t count, const std::string& more) {
    if (count > 1) {
      text += (text.empty() ? "" : ",") + std::string(name) + std::to_string(count) + more;
    }
  };
  const std::int64_t tensor = SizeOf(root, "tensor");
  add("tp=", tensor, HasFlag(root, "tp_comm_overlap") ? ":async" : "");
  const std::string transport = TextAt(root, "cp_comm_type", "p2p");
  add("cp=", IntAt(root, "context_parallel_size", 1),
      transport == "p2p"         ? ":ring"
      : transport == "a2a"       ? ":ulysses"
      : transport == "allgather" ? ""
                                 : ":" + transport);
  add("ep=", SizeOf(root, "expert"), "");
  if (HasFlag(root, "num_experts") && tensor > 1 &&
      IntAt(root, "expert_tensor_parallel_size", tensor) != 1) {
    Refuse(root, "num_experts",
           "expert_tensor_parallel_size 1, since cut experts cannot be predicted");
  }
  const std::int64_t parts = PartsOf(root);
  add("pp=", SizeOf(root, "pipeline"), (parts > 1 ? "x" + std::to_string(parts) : "") + ":even");
  return text;
}

bool IsLocal(const JsonValue& root) {
  return TextAt(root, "transformer_impl", "transformer_engine") == "local";
}

bool KeepsScores(const JsonValue& root) {
  return IsLocal(root) || TextAt(root, "attention_backend", "auto") == "unfused";
}

std::string RecomputeOf(const JsonValue& root, std::vector<Assumption>& assumed) {
  const std::string granularity = TextAt(root, "recompute_granularity",
                                         HasFlag(root, "recompute_activations") ? "selective" : "");
  if (granularity.empty()) {
    return "none";
  }
  if (granularity == "selective") {
    if (TextAt(root, "recompute_modules", "core_attn") != "core_attn") {
      Refuse(root, "recompute_modules",
             "core_attn, since other parts of a layer cannot be predicted");
    }
    if (KeepsScores(root)) {
      Refuse(root,
             HasFlag(root, "recompute_activations") ? "recompute_activations"
                                                    : "recompute_granularity",
             "full or none beside attention that keeps its scores");
    }
    assumed.push_back({"recompute_granularity", "none: flash attention keeps no scores"});
    return "none";
  }
  const std::int64_t rows = IntAt(root, "recompute_num_layers", 1);
  if (TextAt(root, "recompute_method", "uniform") == "uniform") {
    if (rows > 1) {
      assumed.push_back({"recompute_num_layers", "1: inputs of all layers are kept"});
    }
    return "full";
  }
  const std::int64_t all = rows * SizeOf(root, "pipeline") * PartsOf(root);
  const double part = static_cast<double>(all) / static_cast<double>(IntAt(root, "num_layers", 1));
  return part >= 1 ? "full" : "full:" + std::to_string(part);
}

// Masters, products and sums of gradients: those of bf16 are fp32, those of fp16 its own.
std::string PrecisionOf(const JsonValue& root) {
  if (HasFlag(root, "bf16")) {
    return HasFlag(root, "grad_reduce_in_bf16") ? "fp32/bf16/bf16" : "fp32/bf16/fp32";
  }
  const bool sums_fp32 = HasFlag(root, "accumulate_allreduce_grads_in_fp32");
  return !HasFlag(root, "fp16") ? "fp32" : sums_fp32 ? "fp32/fp16/fp32" : "fp32/fp16/fp16";
}

// Megatron's optimizer shards states alone. FSDP2 that keeps what it gathered until the last
// micro-batch moves the same bytes: one gather and one reduction of each weight in a step.
void SetSharding(const JsonValue& root, std::map<std::string, std::string>& flags,
                 std::vector<Assumption>& assumed) {
  const std::string strategy =
      TextAt(root, "data_parallel_sharding_strategy", "optim_grads_params");
  const bool is_fsdp = HasFlag(root, "use_megatron_fsdp") || HasFlag(root, "use_custom_fsdp");
  const bool is_whole =
      HasFlag(root, "use_torch_fsdp2") || (is_fsdp && strategy == "optim_grads_params");
  flags["--reshard"] = is_whole ? "always" : SizeOf(root, "pipeline") > 1 ? "never" : "step";
  if (is_whole) {
    return;
  }
  if (is_fsdp && strategy == "no_shard") {
    Refuse(root, "data_parallel_sharding_strategy", "optim, optim_grads or optim_grads_params");
  }
  if (!is_fsdp && !HasFlag(root, "use_distributed_optimizer")) {
    std::string& shard = flags["--shard"];  // each rank has all of the optimizer
    const std::string ranks = std::to_string(IntAt(root, "context_parallel_size", 1));
    shard = ranks + (shard.empty() ? "" : "," + shard);
    flags["--sync"] = "last";
    assumed.push_back({"use_distributed_optimizer",
                       "false: FSDP2 of one rank each, which sums gradients once a step"});
    return;
  }
  flags["--sync"] = strategy == "optim_grads" && is_fsdp ? "every" : "last";
  assumed.push_back(
      {"use_distributed_optimizer",
       "FSDP2 that gathers and reduces once a step; Megatron keeps gradients longer"});
  if (!HasFlag(root, "overlap_grad_reduce") && !is_fsdp) {
    assumed.push_back({"overlap_grad_reduce", "true"});
  }
}

}  // namespace

TrainerFile ReadMegatron(const JsonValue& root) {
  TrainerFile file;
  file.result = ReadSettings<TrainerSettings>(root, TrainerRows(), SettingKeys::Of("megatron"));
  ScriptFacts& script = file.script;
  const std::string name = TextAt(root, "script", "");
  if (name.empty()) {
    script.assumed.push_back({"script", "pretrain_gpt.py"});
  } else if (name.find("gpt") == std::string::npos && !name.ends_with("train.py")) {
    Refuse(root, "script", "pretrain_gpt.py, since other scripts have other models");
  }
  for (const char* key :
       {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"}) {
    (void)root.At(key).AsInt(1, kLargest);
  }
  script.config = ConfigOf(root, script.assumed);
  script.model = "megatron-" + std::to_string(IntAt(root, "num_layers", 0)) + "x" +
                 std::to_string(IntAt(root, "hidden_size", 0));
  script.sequence_length = IntAt(root, "seq_length", 0);
  script.nodes = IntAt(root, "nnodes", 0);
  script.gpus_per_node = IntAt(root, "nproc_per_node", 0);
  std::map<std::string, std::string>& flags = script.plan_flags;
  flags["--micro-batch"] = std::to_string(IntAt(root, "micro_batch_size", 1));
  if (const std::int64_t batch = IntAt(root, "global_batch_size", 0); batch > 0) {
    flags["--global-batch"] = std::to_string(batch);
  }
  if (const std::string shard = ShardOf(root); !shard.empty()) {
    flags["--shard"] = shard;
  }
  SetSharding(root, flags, script.assumed);
  flags["--recompute"] = RecomputeOf(root, script.assumed);
  flags["--precision"] = PrecisionOf(root);
  const std::string optimizer = TextAt(root, "optimizer", "adam");
  if (optimizer != "adam" && optimizer != "sgd") {
    Refuse(root, "optimizer", "adam or sgd, since others cannot be predicted");
  }
  flags["--optimizer"] = (optimizer == "sgd" ? "sgd" : "adamw") + std::string(":fused");
  const auto clip = root.Find("clip_grad"), decay = root.Find("weight_decay");
  flags["--clip"] = clip && clip->IsNumber() && clip->AsDouble() == 0.0 ? "off" : "on";
  flags["--weight-decay"] = decay && decay->IsNumber() && decay->AsDouble() == 0.0 ? "off" : "on";
  script.stack = IsLocal(root) ? "megatron-2021" : "megatron-core";
  script.attention = KeepsScores(root) ? "materialized" : "";
  if (IntAt(root, "tensor_model_parallel_size", 1) > 1 && !HasFlag(root, "sequence_parallel")) {
    script.assumed.push_back(
        {"sequence_parallel", "true; without it norms and residuals take more memory"});
  }
  return file;
}

}  // namespace shardwright
