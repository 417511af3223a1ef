// axolotl's files (version 0.19): names of its own around the Trainer's arguments.

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "planner/importers/read_adapters.h"
#include "planner/importers/read_trainer.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {
namespace {

// "auto" is bf16 on every GPU that has it. "full" has weights in bf16 without autocast.
void ReadBf16(const JsonValue& root, TrainerFile& file) {
  const auto bf16 = root.Find("bf16");
  const bool is_word = bf16 && !bf16->IsBool();
  const bool is_full = is_word && bf16->AsString() == "full";
  const bool is_alone = file.script.adapters.rank == 0 && !root.Find("deepspeed");
  if (is_word && bf16->AsString() != "auto" && !(is_full && is_alone)) {
    throw bf16->Error(
        "true, false or auto, since weights in bf16 alone below adapters or under DeepSpeed cannot "
        "be predicted");
  }
  file.script.has_bf16_weights = IsOn(root, "bfloat16") || is_word || (bf16 && bf16->AsBool());
  file.result.settings.bf16 = file.script.has_bf16_weights && !is_full;
}

// Liger's kernels of layers are a stack of ours together only; its head and loss in chunks are a
// switch of their own.
void ReadLiger(const JsonValue& root, const JsonValue& plugin, TrainerFile& file) {
  const bool gated = IsOn(root, "liger_glu_activation") || IsOn(root, "liger_swiglu");
  const int layers = int(IsOn(root, "liger_rope")) + int(IsOn(root, "liger_rms_norm")) + int(gated);
  if (layers != 0 && layers != 3) {
    throw plugin.Error(
        "liger_rope, liger_rms_norm and liger_glu_activation all on or all off, since some of "
        "Liger's kernels alone cannot be predicted");
  }
  constexpr std::int64_t kLigerChunks = 16;
  file.result.settings.use_liger_kernel = layers == 3;
  file.script.loss_chunks = IsOn(root, "liger_fused_linear_cross_entropy") ? kLigerChunks : 1;
}

// Liger, and Cut Cross Entropy, which holds no logits.
void ReadPlugins(const JsonValue& root, TrainerFile& file) {
  const auto plugins = root.Find("plugins");
  for (std::size_t i = 0; plugins && plugins->IsArray() && i < plugins->size(); ++i) {
    const std::string name = (*plugins)[i].AsString();
    if (name.find("liger") != std::string::npos) {
      ReadLiger(root, (*plugins)[i], file);
    } else if (name.find("cut_cross_entropy") != std::string::npos) {
      const auto told = root.Find("cut_cross_entropy");
      file.script.loss_rows = told && !told->AsBool() ? 0 : kLossRows;
    } else if (name.find("swanlab") == name.npos && name.find("KernelsPlugin") == name.npos) {
      // The one writes logs, the other has switches of its own.
      throw(*plugins)[i].Error("Liger's or Cut Cross Entropy's, since the plugin " + name +
                               " cannot be predicted");
    }
  }
}

// gpt-oss comes in 4 bits, and is made whole where it says so.
void CheckDequantized(const JsonValue& root) {
  const auto config = root.Find("model_quantization_config");
  const auto more = root.Find("model_quantization_config_kwargs");
  const auto whole = more && more->IsObject() ? more->Find("dequantize") : std::nullopt;
  if (config && !config->AsString().empty() &&
      !(config->AsString() == "Mxfp4Config" && whole && whole->AsBool())) {
    throw config->Error(
        "Mxfp4Config with dequantize true, since quantized weights of this kind cannot be "
        "predicted");
  }
}

// Offload goes with recomputation, whose inputs are what is left to travel.
void ReadAxolotlRecompute(const JsonValue& root, TrainerFile& file) {
  const auto told = root.Find("gradient_checkpointing");
  const bool offloads = told && told->IsString();
  if (offloads) {
    Demand(*told, {"offload"}, "true, false or offload");
  }
  const auto offload = root.Find("activation_offloading");
  if (offload && offload->IsString()) {
    Demand(*offload, {"legacy", "hidden_states"}, "true, false, legacy or hidden_states");
  }
  file.script.offloads_activations = offloads || (offload && offload->IsString()) ||
                                     (offload && !offload->IsString() && offload->AsBool());
  if (told || file.script.offloads_activations) {
    file.result.settings.gradient_checkpointing =
        file.script.offloads_activations || told->AsBool();
  }
}

// Where a pattern's rows begin, such as "[:32000]" of "^lm_head.weight$[:32000]"; otherwise its
// end.
std::size_t BeginOfRows(const std::string& text) {
  const std::size_t at = text.ends_with(']') ? text.rfind('[') : text.size();
  return text.find_first_not_of("0123456789:]", at + 1) == std::string::npos ? at : text.size();
}

// Beside adapters such names match nothing, and nothing learns (freeze_layers_except of axolotl's
// utils/freeze.py). Patterns are of beginnings, and dots are dots, but for those before a plus. A
// text model that stands for a larger one has shorter names.
void ReadUnfrozen(const JsonValue& root, TrainerFile& file) {
  const auto list = root.Find("unfrozen_parameters");
  for (std::size_t i = 0; list && list->IsArray() && i < list->size(); ++i) {
    const std::string text = (*list)[i].AsString();
    const std::string name = text.substr(0, BeginOfRows(text));
    if (name != text) {
      file.script.assumed.push_back({text, "whole tensors, with gradients of zeros in other rows"});
    }
    std::string pattern;
    for (std::size_t k = 0; k < name.size() - (name.ends_with(".*") ? 2 : 0); ++k) {
      pattern += (name[k] == '.' && name[k + 1] != '+' ? "\\" : "") + std::string(1, name[k]);
    }
    const std::size_t part = pattern.find("\\.language_model");
    pattern.erase(std::min(part, pattern.size()),
                  part == std::string::npos ? 0 : std::string("\\.language_model").size());
    std::vector<std::string> globs = GlobsOfPattern(pattern);
    if (file.script.adapters.rank > 0) {
      throw list->Error(
          "no such key beside an adapter, since nothing would learn: names begin with "
          "base_model, and patterns are matched from there");
    }
    if (globs.empty()) {
      throw list->Error(
          "names, alternatives and numbers, since parameters frozen by such patterns cannot be "
          "predicted");
    }
    for (std::string& glob : globs) {
      glob += name.ends_with('$') ? "" : "*";
    }
    file.script.learns.emplace_back(name, std::move(globs));
  }
}

// Without FSDP axolotl makes fp32 of norms, embeddings, head and routers. Where attention or Cut
// Cross Entropy wants 16 bits, only the routers stay in fp32 (_configure_embedding_dtypes).
std::vector<std::string> UpcastModules(const JsonValue& root, bool cuts_loss) {
  const auto name = root.Find("attn_implementation");
  const std::string attention = name ? name->AsString() : "sdpa";
  const auto is_on = [&](const char* key) { return IsOn(root, key); };
  if (cuts_loss || (attention != "sdpa" && attention != "eager") ||
      AnyOf(std::array{"flash_attention", "xformers_attention", "flex_attention"}, is_on)) {
    return {"*.gate.weight"};
  }
  return {"*norm*", "*embed_tokens*", "*lm_head*", "*embed_in*", "*embed_out*", "*.gate.weight"};
}

// Tables `trl` and `vllm`; where the first says colocate the engine has 0.9 of the memory.
// sequence_len cuts nothing that is generated.
void ReadAxolotlCompletions(const JsonValue& root, TrainerFile& file) {
  const JsonValue trl = root.At("trl");
  const auto vllm = root.Find("vllm");
  const auto part = vllm ? vllm->Find("gpu_memory_utilization") : std::nullopt;
  file.script.sequence_length = 0;
  ReadCompletions(trl, part ? part->AsDouble() : trl.Find("vllm_mode") ? 0.9 : 0.3, file);
}

// Answers are compared by their log-probabilities, or by a score.
void ReadAxolotlPairs(const JsonValue& root, TrainerFile& file) {
  const auto rl = root.Find("rl");
  if (rl && !rl->AsString().empty()) {
    Demand(*rl, {"dpo", "ipo", "orpo", "kto", "grpo", "gdpo"}, "dpo, ipo, orpo, kto or grpo");
    if (rl->AsString() == "grpo" || rl->AsString() == "gdpo") {
      return ReadAxolotlCompletions(root, file);
    }
    if (rl->AsString() == "kto") {
      return ReadSingles(root, file);
    }
    ReadPreferences(root, "rl", file);
  } else if (IsOn(root, "reward_model")) {
    if (const auto labels = root.Find("num_labels")) {
      (void)labels->AsInt(1, 1);
    }
    ReadRewards(file);
  } else if (const auto labels = root.Find("num_labels")) {
    throw labels->Error("no such key, since a reward head cannot be predicted");
  }
}

}  // namespace

TrainerFile ReadAxolotl(const JsonValue& root) {
  TrainerFile file;
  file.result = ReadSettings<TrainerSettings>(root, TrainerRows(), SettingKeys::Of("axolotl"));
  TrainerSettings& s = file.result.settings;
  ReadFsdp(root, s);
  if (const auto config = root.Find("fsdp_config"); config && !root.Find("fsdp")) {
    s.fsdp = !config->Keys().empty();
  }
  if (const auto adapter = root.Find("adapter"); adapter && !adapter->AsString().empty()) {
    Demand(*adapter, {"lora", "qlora"}, "lora or qlora");
    file.script.adapters = ReadAdapters(root, "axolotl", FrozenFormat::kParam);
  } else {
    RefuseQuantized(root);
    if (IsOn(root, "quantize_moe_experts")) {
      throw root.At("quantize_moe_experts").Error("false without an adapter, as axolotl demands");
    }
  }
  ReadUnfrozen(root, file);
  CheckDequantized(root);
  ReadBf16(root, file);
  s.find_unused_parameters = s.find_unused_parameters.value_or(false);  // it says so to the Trainer
  ReadPlugins(root, file);
  if (!s.fsdp.value_or(false)) {
    file.script.fp32_masters = UpcastModules(root, file.script.loss_rows > 0);
  }
  ReadAxolotlRecompute(root, file);
  if (!s.per_device_train_batch_size) {
    s.per_device_train_batch_size = 1;
    file.script.assumed.push_back({"micro_batch_size", "1"});
  }
  // Of one GPU, in place of gradient_accumulation_steps (utils/config, normalize_config).
  if (const auto batch = root.Find("batch_size"); batch && !s.gradient_accumulation_steps) {
    const std::int64_t micro = std::max<std::int64_t>(1, *s.per_device_train_batch_size);
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    s.gradient_accumulation_steps = std::max<std::int64_t>(1, batch->AsInt(1, kMost) / micro);
  }
  file.script.model = root.At("base_model").AsString();
  file.script.sequence_length = LengthOf(root, {"sequence_len"});
  constexpr std::int64_t kSequence = 512;
  if (file.script.sequence_length == 0) {
    file.script.sequence_length = kSequence;
    file.script.assumed.push_back({"sequence_len", std::to_string(kSequence)});
  }
  ReadAxolotlPairs(root, file);
  file.script.dp_shard = LengthOf(root, {"dp_shard_size"});
  file.script.dp_replicate = LengthOf(root, {"dp_replicate_size"});
  if (file.script.dp_shard > 1 && !s.fsdp.value_or(false)) {
    throw root.At("dp_shard_size").Error("an fsdp_config beside it, as axolotl demands");
  }
  if (s.context_size.value_or(1) > 1) {
    const bool gathers = IsOn(root, "sample_packing");  // varlen_llama3, otherwise batch_ring
    file.script.context_method = gathers ? ContextMethod::kGather : ContextMethod::kRing;
    file.script.assumed.push_back(
        {"context_parallel_size", gathers
                                      ? "keys and values gathered at once, head and tail shared out"
                                      : "a ring with head and tail shared out"});
  }
  file.script.attention =
      IsOn(root, "eager_attention") ? "materialized" : AttentionOf(root, {"attn_implementation"});
  CheckTrainer(root, file.result);
  CheckOptimizer(root, "optimizer", s);
  return file;
}

}  // namespace shardwright
