#include "planner/importers/script_words.h"

#include <algorithm>
#include <string>

#include "core/error.h"
#include "planner/importers/read_adapters.h"
#include "schedule/lower/optimizer.h"

namespace shardwright {
namespace {

// Version 4 of Transformers: fsdp is a list of words, and FSDP is PyTorch's first one.
void ReadFsdpWords(const JsonValue& fsdp, TrainerSettings& s) {
  std::string words;
  for (std::size_t i = 0; fsdp.IsArray() && i < fsdp.size(); ++i) {
    words += fsdp[i].AsString() + " ";
  }
  words += fsdp.IsArray() ? std::string() : fsdp.AsString() + " ";
  if (words.find_first_not_of(' ') == std::string::npos) {
    s.fsdp = false;
    return;
  }
  s.fsdp = true;
  s.version = s.version.value_or(1);
  bool wraps = false;
  for (std::size_t at = 0; at < words.size();) {
    const std::size_t end = words.find(' ', at);
    const std::string word = words.substr(at, end - at);
    at = end + 1;
    if (word == "auto_wrap") {
      wraps = true;
    } else if (word == "offload") {
      s.cpu_offload = true;
    } else if (word == "full_shard" || word == "shard_grad_op" || word == "hybrid_shard" ||
               word == "hybrid_shard_zero2") {
      if (*s.version == 1) {
        s.sharding_strategy = word;
      } else {
        s.reshard_after_forward = word == "full_shard" || word == "hybrid_shard";
      }
    } else if (!word.empty()) {
      throw fsdp.Error(
          "words out of full_shard, shard_grad_op, hybrid_shard, hybrid_shard_zero2, "
          "auto_wrap and offload");
    }
  }
  if (!s.auto_wrap_policy) {
    s.auto_wrap_policy = !wraps                             ? "NO_WRAP"
                         : s.min_num_params.value_or(0) > 0 ? "SIZE_BASED_WRAP"
                                                            : "TRANSFORMER_BASED_WRAP";
  }
}

}  // namespace

void ReadFsdp(const JsonValue& root, TrainerSettings& s) {
  if (const auto config = root.Find("fsdp_config"); config && config->IsObject()) {
    if (const auto version = config->Find("fsdp_version")) {
      s.version = version->AsInt(1, 2);
    }
  }
  if (const auto fsdp = root.Find("fsdp")) {
    if (fsdp->IsBool()) {
      s.fsdp = fsdp->AsBool();
    } else {
      ReadFsdpWords(*fsdp, s);
    }
  }
}

// "adamw_hf" is the loop over parameters that Transformers had until version 4.
void CheckOptimizer(const JsonValue& root, std::string_view key, const TrainerSettings& s) {
  if (s.optim && !OptimizerNamed(*s.optim)) {
    std::string words;
    for (const std::string_view word : OptimizerWords()) {
      words += (words.empty() ? "" : ", ") + std::string(word);
    }
    throw root.At(key).Error("one of " + words + ", since the optimizer " + *s.optim +
                             " cannot be predicted");
  }
}

// The first of these keys that the file has.
std::optional<JsonValue> FindOne(const JsonValue& root, Keys keys) {
  for (const std::string_view key : keys) {
    if (auto value = root.Find(key)) {
      return value;
    }
  }
  return std::nullopt;
}

bool IsOn(const JsonValue& root, std::string_view key) {
  const auto value = root.Find(key);
  return value && value->AsBool();
}

std::int64_t LengthOf(const JsonValue& root, Keys keys) {
  constexpr std::int64_t kLongest = std::int64_t{1} << 30;
  const auto length = FindOne(root, keys);
  return length ? length->AsInt(1, kLongest) : 0;
}

LearningLayers ReadLearningLayers(const JsonValue& table) {
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  const auto count = table.Find("freeze_trainable_layers");
  const auto modules = table.Find("freeze_trainable_modules");
  const auto outside = table.Find("freeze_extra_modules");
  return {count ? count->AsInt(-kMost, kMost) : 2,
          modules ? NamesIn(*modules) : std::vector<std::string>{"all"},
          outside ? NamesIn(*outside) : std::vector<std::string>()};
}

// Transformers' names, and LLaMA-Factory's; empty: as the kernel set has it.
std::string AttentionOf(const JsonValue& root, Keys keys) {
  const auto name = FindOne(root, keys);
  const std::string text = name ? name->AsString() : "";
  return text == "eager" || text == "disabled"          ? "materialized"
         : text == "flash_attention_3" || text == "fa3" ? "flash3"
                                                        : "";
}

void Demand(const JsonValue& value, Keys values, std::string_view expected) {
  if (std::find(values.begin(), values.end(), value.AsString()) == values.end()) {
    throw value.Error(std::string(expected) + ", since " + value.AsString() +
                      " training cannot be predicted");
  }
}

// KTO: single answers, against a reference that runs in every step.
void ReadSingles(const JsonValue& root, TrainerFile& file) {
  if (const auto loss = root.Find("loss_type")) {
    Demand(*loss, {"kto"}, "kto");
  }
  if (IsOn(root, "precompute_ref_log_probs")) {
    throw root.At("precompute_ref_log_probs")
        .Error("false, since KTO without its reference cannot be predicted");
  }
  file.script.trains_by = TrainsBy::kKto;
  file.script.adapters.dropout = 0.0;
}

// Pairs, whose answers get a score each in the place of logits. PEFT trains the score whole.
void ReadRewards(TrainerFile& file) {
  file.script.trains_by = TrainsBy::kReward;
  file.script.adapters.dropout = 0.0;
  std::vector<std::string>& saved = file.script.adapters.saved;
  if (file.script.adapters.rank > 0 &&
      std::find(saved.begin(), saved.end(), "score") == saved.end()) {
    saved.emplace_back("score");
  }
}

// Pairs, whose two answers run as one batch, without dropout (TRL's disable_dropout). Without a
// reference are the losses orpo and simpo.
void ReadPreferences(const JsonValue& root, std::string_view loss_key, TrainerFile& file) {
  const auto loss = root.Find(loss_key);
  if (loss) {
    Demand(*loss,
           {"dpo", "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair",
            "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "kto_pair",
            "orpo", "simpo"},
           "a loss of pairs");
  }
  const bool is_alone = loss && (loss->AsString() == "orpo" || loss->AsString() == "simpo");
  file.script.trains_by = is_alone                                 ? TrainsBy::kOrpo
                          : IsOn(root, "precompute_ref_log_probs") ? TrainsBy::kDpoPrecomputed
                                                                   : TrainsBy::kDpo;
  file.script.adapters.dropout = 0.0;
}

// Completions that an engine, or the trainer itself, generates: TRL's GRPOConfig, also as axolotl's
// table `trl`. Prompts have no limit any more; 512 tokens was theirs before. `updates` may share a
// generation of `batches`; the old log-probabilities are told then, and where an engine samples.
void ReadCompletions(const JsonValue& root, double engine, TrainerFile& file) {
  ScriptFacts& script = file.script;
  Rollout& rollout = script.rollout;
  const auto count = [&](const char* key, std::int64_t usual) {
    const std::int64_t told = LengthOf(root, {key});
    if (told == 0) {
      script.assumed.push_back({key, std::to_string(usual)});
    }
    return told == 0 ? usual : told;
  };
  script.trains_by = TrainsBy::kGrpo;
  rollout.completion = count("max_completion_length", 512);
  rollout.generations = count("num_generations", 8);
  if (script.sequence_length == 0) {
    script.sequence_length = rollout.completion + count("max_prompt_length", 512);
  }
  rollout.updates = std::max<std::int64_t>(1, LengthOf(root, {"num_iterations"}));
  rollout.batches = LengthOf(root, {"steps_per_generation"});
  const auto beta = root.Find("beta");
  rollout.has_reference = beta && beta->AsDouble() != 0;
  const bool has_engine = IsOn(root, "use_vllm");
  const auto mode = root.Find("vllm_mode");
  if (mode) {
    Demand(*mode, {"colocate", "server"}, "colocate or server");
  }
  if (has_engine && !(mode && mode->AsString() == "server")) {
    const auto part = root.Find("vllm_gpu_memory_utilization");
    rollout.engine = part ? part->AsDouble() : engine;
    rollout.sleeps = IsOn(root, "vllm_enable_sleep_mode");
  }
  rollout.by_trainer = !has_engine;
  const std::int64_t steps = file.result.settings.gradient_accumulation_steps.value_or(1);
  const auto corrects = root.Find("vllm_importance_sampling_correction");
  rollout.has_old =
      steps % (rollout.updates * (rollout.batches > 0 ? rollout.batches : steps)) != 0 ||
      (has_engine && (!corrects || corrects->AsBool()));
}

void CheckTrainer(const JsonValue& root, ReadResult<TrainerSettings>& result) {
  TrainerSettings& s = result.settings;
  if (s.bf16.value_or(false) && s.fp16.value_or(false)) {
    throw root.At("fp16").Error("false beside bf16");
  }
  if (s.use_liger_kernel.value_or(false) && s.torch_compile.value_or(false)) {
    result.left_out.emplace_back("torch_compile");  // see StackOf
  }
  if (s.gradient_checkpointing.value_or(false) && s.activation_checkpointing.value_or(false)) {
    throw InputError(root.path().str() + ": gradient_checkpointing", "true",
                     "false beside fsdp_config.activation_checkpointing, as the Trainer demands");
  }
}

}  // namespace shardwright
