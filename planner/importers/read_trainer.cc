#include "planner/importers/read_trainer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "planner/importers/read_adapters.h"
#include "planner/importers/setting_keys.h"
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
    throw root.At(key).Error("one of " + Listed(OptimizerWords()) + ", since the optimizer " +
                             *s.optim + " cannot be predicted");
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

namespace {

// What is neither said nor TrainingArguments' default.
void TakeDefault(std::optional<bool>& slot, bool value, const char* key, TrainerFile& file) {
  if (!slot) {
    slot = value;
    file.script.assumed.push_back({key, value ? "true" : "false"});
  }
}

// --- Scripts around the Trainer

constexpr std::string_view kLlamaFactoryRecompute = "disable_gradient_checkpointing";

// Scripts that nobody here knows have adapters of their own.
void RefuseAdapters(const JsonValue& root) {
  for (const char* key : {"use_peft", "lora_enable", "use_lora"}) {
    if (IsOn(root, key)) {
      throw root.At(key).Error(
          "false, since adapters of this script are not read: plan --lora-rank N makes such a "
          "plan");
    }
  }
}

// Weights as they were loaded, where something says their dtype; others are in fp32.
FrozenFormat LoadedBase(const TrainerFile& file) {
  return file.script.has_bf16_weights ? FrozenFormat::kParam : FrozenFormat::kMaster;
}

bool IsLlamaFactory(const JsonValue& root) {
  return FindOne(root, {"cutoff_len", "finetuning_type", "stage", "enable_liger_kernel", "template",
                        "infer_backend", "export_dir", kLlamaFactoryRecompute})
      .has_value();
}

// Its other commands have files of the same keys.
void RefuseOtherCommands(const JsonValue& root) {
  const bool trains = FindOne(root, {"per_device_train_batch_size", "num_train_epochs", "max_steps",
                                     "learning_rate"})
                          .has_value();
  const auto told = root.Find("do_train");
  if (IsLlamaFactory(root) && (told ? !told->AsBool() : !trains)) {
    const char* const command = root.Find("export_dir") ? "merging of adapters"
                                : IsOn(root, "do_predict") || IsOn(root, "do_eval") ? "evaluation"
                                                                                    : "inference";
    throw InputError(root.path().str() + ": do_train", told ? "false" : "no value",
                     std::string("true, since ") + command +
                         " is not read; estimate MODEL CLUSTER --mode forward is about forwards");
  }
}

// LLaMA-Factory recomputes every layer unless it is told not to, and trains an adapter unless it is
// told to train all.
void ReadLlamaFactory(const JsonValue& root, TrainerFile& file) {
  TrainerSettings& s = file.result.settings;
  if (!root.Find("do_train")) {
    file.script.assumed.push_back({"do_train", "true"});
  }
  const auto type = root.Find("finetuning_type");
  if (!type) {
    file.script.assumed.push_back({"finetuning_type", "lora"});
  } else {
    Demand(*type, {"full", "lora", "freeze"}, "full, lora or freeze");
  }
  if (!type || type->AsString() == "lora") {
    file.script.adapters = ReadAdapters(root, "llamafactory", FrozenFormat::kParam);
    s.find_unused_parameters = s.find_unused_parameters.value_or(false);  // hparams/parser.py
  } else {
    RefuseQuantized(root);
    if (type->AsString() == "freeze") {
      file.script.layers = ReadLearningLayers(root);
    }
    if (IsOn(root, "pure_bf16")) {
      file.script.has_bf16_weights = true;
    }
  }
  if (IsOn(root, "pure_bf16") && (file.script.adapters.rank > 0 || root.Find("deepspeed"))) {
    throw root.At("pure_bf16")
        .Error(
            "false, since weights in bf16 alone below adapters or under DeepSpeed cannot be "
            "predicted");
  }
  if (const auto stage = root.Find("stage")) {
    Demand(*stage, {"pt", "sft", "dpo", "kto"}, "pt, sft, dpo or kto");
    if (stage->AsString() == "dpo") {
      ReadPreferences(root, "pref_loss", file);
    } else if (stage->AsString() == "kto") {
      file.script.assumed.push_back({"stage", "kto, mismatched answers first as in TRL"});
      ReadSingles(root, file);
    }
  }
  if (root.Find(kLlamaFactoryRecompute)) {
    s.gradient_checkpointing = !IsOn(root, kLlamaFactoryRecompute);
  }
  TakeDefault(s.gradient_checkpointing, true, "gradient_checkpointing", file);
  file.script.recomputes_by_itself = true;
  constexpr std::int64_t kCutoff = 2048;
  if (file.script.sequence_length == 0) {
    file.script.sequence_length = kCutoff;
    file.script.assumed.push_back({"cutoff_len", std::to_string(kCutoff)});
  }
}

// Whether a command line runs one of TRL's scripts.
bool RunsTrl(const JsonValue& root) {
  const auto script = root.Find("script");
  const std::string path = script ? script->AsString() : "";
  return path.find("trl/") != path.npos || path.find("examples/scripts/") != path.npos;
}

// A key that scripts have which generate.
std::optional<JsonValue> CompletionKey(const JsonValue& root) {
  return FindOne(root, {"num_generations", "max_completion_length", "use_vllm",
                        "steps_per_generation", "reward_funcs", "vllm_mode"});
}

// sft, dpo, kto, orpo, reward or grpo, as the command line says. Files of the scripts have the same
// keys: a loss of answers, or the name of the file or of its folder tells them.
std::string TrlScript(const JsonValue& root) {
  constexpr std::array<std::string_view, 7> kRead = {"sft",    "dpo",  "kto", "orpo",
                                                     "reward", "grpo", "gspo"};
  const std::string where = root.path().str();
  if (RunsTrl(root)) {
    const std::string stem = std::filesystem::path(root.At("script").AsString()).stem().string();
    const std::string first = stem.substr(0, stem.find('_'));  // sft_gpt_oss, reward_modeling
    const bool is_other = stem.find("vlm") != stem.npos || stem.find("diffusion") != stem.npos;
    if (is_other || std::find(kRead.begin(), kRead.end(), first) == kRead.end()) {
      throw root.At("script").Error("TRL's sft, dpo, kto, orpo, reward or grpo, since the script " +
                                    stem + " cannot be predicted");
    }
    return first == "gspo" ? "grpo" : first;
  }
  const std::filesystem::path path(where);
  const std::string name = (path.parent_path().filename() / path.filename()).string();
  const auto says = [&](std::string_view word) { return name.find(word) != name.npos; };
  const bool is_unread =
      says("cpo") || says("gkd") || says("rloo") || says("dppo") || says("online");
  if (!is_unread && (says("grpo") || CompletionKey(root))) {
    return "grpo";
  }
  const bool compares = FindOne(root, {"beta", "max_prompt_length", "precompute_ref_log_probs",
                                       "desirable_weight", "undesirable_weight"})
                            .has_value();
  if (!compares) {
    return root.Find("center_rewards_coefficient") || says("reward") ? "reward" : "sft";
  }
  const auto loss = root.Find("loss_type");
  const bool is_kto = loss ? loss->AsString() == "kto" : says("kto");
  const bool is_other = (says("kto") && !is_kto) || is_unread;
  if (is_other || !(says("orpo") || is_kto || says("dpo") || loss)) {
    throw InputError(where,
                     is_other ? "a script of TRL that compares no answers with a reference"
                              : "keys that several scripts of TRL have, and none that tells which",
                     "dpo, kto or orpo in the file's name or its folder's, or loss_type, such as "
                     "sigmoid for dpo");
  }
  return says("orpo") ? "orpo" : is_kto ? "kto" : "dpo";
}

// TRL before 0.20 says max_seq_length, and runs head and loss over all rows at once; later ones run
// a chunk of rows after the other unless they are told not to, or Liger does it.
void ReadTrlLoss(const JsonValue& root, TrainerFile& file) {
  const std::string script = TrlScript(root);
  if (script != "sft" && !RunsTrl(root)) {
    file.script.assumed.push_back({"script", "TRL's " + script});
  }
  if (script == "reward") {
    const auto task = root.Find("lora_task_type");
    if (file.script.adapters.rank > 0 && !(task && task->AsString() == "SEQ_CLS")) {
      throw InputError(root.path().str() + ": lora_task_type", task ? task->AsString() : "no value",
                       "SEQ_CLS, since a score that does not learn cannot be predicted");
    }
    return ReadRewards(file);
  }
  if (const auto key = CompletionKey(root); key && script != "grpo") {
    throw key->Error("no such key, since " + script + " that generates cannot be predicted");
  }
  if (script != "sft") {
    if (script == "grpo") {
      constexpr double kEngine = 0.3;
      ReadCompletions(root, kEngine, file);
    } else if (script == "kto") {
      ReadSingles(root, file);
    } else {
      ReadPreferences(root, "loss_type", file);
    }
    if (script == "orpo") {
      file.script.trains_by = TrainsBy::kOrpo;
    }
    if (!root.Find("max_prompt_length") && !file.result.settings.use_liger_kernel.value_or(false)) {
      file.script.assumed.push_back({"head and loss", "in chunks (TRL 1.16)"});
      file.script.loss_rows = kLossRows;
    }
    return;
  }
  const bool is_old = root.Find("max_seq_length").has_value();
  const auto type = root.Find("loss_type");
  if (type) {
    Demand(*type, {"nll", "chunked_nll"}, "nll or chunked_nll");
  }
  if (file.result.settings.use_liger_kernel.value_or(false) || (is_old && !type)) {
    return;
  }
  if (!type) {
    file.script.assumed.push_back({"loss_type", "\"chunked_nll\" (TRL since 1.7)"});
  }
  file.script.loss_rows = !type || type->AsString() == "chunked_nll" ? kLossRows : 0;
}

// SFTConfig and its siblings have other defaults than TrainingArguments.
void ReadTrl(const JsonValue& root, TrainerFile& file) {
  TrainerSettings& s = file.result.settings;
  if (IsOn(root, "use_peft")) {
    file.script.adapters = ReadAdapters(root, "trl", LoadedBase(file));
    // SFTTrainer makes bf16 of the adapters above quantized weights.
    file.script.has_bf16_adapters = file.script.adapters.base > FrozenFormat::kParam;
  } else {
    RefuseQuantized(root);
  }
  ReadTrlLoss(root, file);
  TakeDefault(s.gradient_checkpointing, true, "gradient_checkpointing", file);
  if (!s.fp16.value_or(false)) {
    TakeDefault(s.bf16, true, "bf16", file);
  }
  constexpr std::int64_t kMaxLength = 1024;
  if (file.script.sequence_length == 0) {
    file.script.sequence_length = kMaxLength;
    file.script.assumed.push_back({"max_length", std::to_string(kMaxLength)});
  }
}

// On a command line: what torchrun, `accelerate launch` and `deepspeed` are told.
void ReadLauncher(const JsonValue& root, ScriptFacts& script) {
  if (const auto file = root.Find("config_file")) {
    script.accelerate_file = file->AsString();
  }
  constexpr std::int64_t kMost = std::int64_t{1} << 20;
  if (const auto nodes = root.Find("nnodes")) {
    script.nodes = nodes->AsInt(1, kMost);
  }
  if (const auto gpus = FindOne(root, {"nproc_per_node", "num_gpus"})) {
    script.gpus_per_node = gpus->AsInt(1, kMost);
  }
  // Of `accelerate launch`: all processes, in place of what its file says.
  if (const auto machines = root.Find("num_machines")) {
    script.nodes = machines->AsInt(1, kMost);
  }
  if (const auto processes = root.Find("num_processes")) {
    const std::int64_t nodes = std::max<std::int64_t>(1, script.nodes);
    const std::int64_t count = processes->AsInt(1, kMost);
    if (count % nodes != 0) {
      throw processes->Error("a multiple of num_machines, " + std::to_string(nodes));
    }
    script.gpus_per_node = count / nodes;
  }
}

void ReadScript(const JsonValue& root, TrainerFile& file) {
  ReadLauncher(root, file.script);
  if (const auto name = root.Find("model_name_or_path")) {
    file.script.model = name->AsString();
  }
  file.script.attention = AttentionOf(root, {"attn_implementation", "flash_attn"});
  file.script.sequence_length = LengthOf(
      root, {"max_length", "max_seq_length", "cutoff_len", "block_size", "model_max_length"});
  file.script.offloads_activations = IsOn(root, "activation_offloading");
  const auto dtype = FindOne(root, {"torch_dtype", "dtype"});
  file.script.has_bf16_weights = dtype && dtype->AsString() == "bfloat16";
  if (IsLlamaFactory(root)) {
    return ReadLlamaFactory(root, file);
  }
  const bool says_trl =
      RunsTrl(root) ||
      FindOne(root, {"max_length", "packing", "dataset_mixture", "dataset_text_field",
                     "assistant_only_loss", "completion_only_loss", "loss_type", "beta",
                     "max_prompt_length", "num_generations", "max_completion_length"})
          .has_value();
  // Transformers' run_clm.py has this one, too, beside others of its own.
  const bool may_be_trl = root.Find("dataset_name") &&
                          !FindOne(root, {"block_size", "dataset_config_name", "model_max_length",
                                          "validation_split_percentage"});
  if (says_trl || may_be_trl) {
    if (!says_trl && TrlScript(root) == "sft") {
      file.script.assumed.push_back({"script", "TRL's sft"});
    }
    return ReadTrl(root, file);
  }
  RefuseAdapters(root);
  RefuseQuantized(root);
}

}  // namespace

TrainerFile ReadTrainer(const JsonValue& root, const std::optional<JsonValue>& fsdp_config) {
  RefuseOtherCommands(root);
  const SettingKeys& keys = SettingKeys::Of("trainer");
  TrainerFile file;
  file.result = ReadSettings<TrainerSettings>(root, TrainerRows(), keys);
  if (fsdp_config) {
    TrainerSettings& s = file.result.settings;
    s = ReadSettings<TrainerSettings>(*fsdp_config, TrainerRows(), keys, std::move(s)).settings;
    ReadFsdp(*fsdp_config, s);
  }
  ReadFsdp(root, file.result.settings);
  ReadScript(root, file);
  CheckTrainer(root, file.result);
  CheckOptimizer(root, "optim", file.result.settings);
  return file;
}

}  // namespace shardwright
