#include "planner/importers/read_trainer.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <span>
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

using Keys = std::initializer_list<std::string_view>;

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

// Transformers' names, and LLaMA-Factory's; empty: as the kernel set has it.
std::string AttentionOf(const JsonValue& root, Keys keys) {
  const auto name = FindOne(root, keys);
  const std::string text = name ? name->AsString() : "";
  return text == "eager" || text == "disabled"          ? "materialized"
         : text == "flash_attention_3" || text == "fa3" ? "flash3"
                                                        : "";
}

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
    Demand(*type, {"full", "lora"}, "full or lora");
  }
  if (!type || type->AsString() == "lora") {
    file.script.adapters = ReadAdapters(root, "llamafactory", FrozenFormat::kParam);
    s.find_unused_parameters = s.find_unused_parameters.value_or(false);  // hparams/parser.py
  } else {
    RefuseQuantized(root);
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

// --- axolotl

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

// Beside adapters such names match nothing, and nothing learns (freeze_layers_except of axolotl's
// utils/freeze.py). Patterns are of beginnings, and dots are dots, but for those before a plus. A
// text model that stands for a larger one has shorter names.
void ReadUnfrozen(const JsonValue& root, TrainerFile& file) {
  const auto list = root.Find("unfrozen_parameters");
  for (std::size_t i = 0; list && list->IsArray() && i < list->size(); ++i) {
    const std::string name = (*list)[i].AsString();
    std::string pattern;
    for (std::size_t k = 0; k < name.size() - (name.ends_with(".*") ? 2 : 0); ++k) {
      pattern += (name[k] == '.' && name[k + 1] != '+' ? "\\" : "") + std::string(1, name[k]);
    }
    const std::size_t part = pattern.find("\\.language_model");
    pattern.erase(std::min(part, pattern.size()),
                  part == std::string::npos ? 0 : std::string("\\.language_model").size());
    std::vector<std::string> globs = GlobsOfPattern(pattern);
    if (globs.empty() || file.script.adapters.rank > 0) {
      throw list->Error(
          "names, alternatives and numbers, without adapters, since parameters frozen by such "
          "patterns cannot be predicted");
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
