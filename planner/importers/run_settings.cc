#include "planner/importers/run_settings.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/text.h"
#include "planner/importers/document.h"
#include "planner/importers/other_keys.h"
#include "planner/importers/read_deepspeed.h"
#include "planner/importers/read_settings.h"
#include "planner/importers/read_trainer.h"

namespace shardwright {
namespace {

enum class Kind {
  kTorchtitan,
  kFairseq,
  kFairseqFlags,
  kAccelerate,
  kAxolotl,
  kTrainer,
  kDeepSpeed
};

// Keys at the top that only one framework's files have.
struct Mark {
  std::string_view key;
  Kind kind;
};
constexpr std::array<Mark, 21> kMarks = {{
    {"per_device_train_batch_size", Kind::kTrainer},  // beside flags of `accelerate launch`, too
    {"model_name_or_path", Kind::kTrainer},
    {"compute_environment", Kind::kAccelerate},
    {"distributed_type", Kind::kAccelerate},
    {"num_machines", Kind::kAccelerate},
    {"zero_optimization", Kind::kDeepSpeed},
    {"train_micro_batch_size_per_gpu", Kind::kDeepSpeed},
    {"train_batch_size", Kind::kDeepSpeed},
    {"base_model", Kind::kAxolotl},
    {"output_dir", Kind::kTrainer},
    {"fsdp", Kind::kTrainer},
    {"num_train_epochs", Kind::kTrainer},
    {"distributed_training", Kind::kFairseq},
    {"optimization", Kind::kFairseq},
    {"ddp_backend", Kind::kFairseqFlags},
    {"tokens_per_sample", Kind::kFairseqFlags},
    {"update_freq", Kind::kFairseqFlags},
    {"arch", Kind::kFairseqFlags},
    {"parallelism", Kind::kTorchtitan},
    {"training", Kind::kTorchtitan},
    {"activation_checkpoint", Kind::kTorchtitan},
}};

Kind KindOf(const JsonValue& root, const std::string& file) {
  for (const Mark& mark : kMarks) {
    if (root.Find(mark.key)) {
      return mark.kind;
    }
  }
  throw InputError(
      file, "no key that tells the framework",
      "settings of torchtitan (TOML), Accelerate (YAML or JSON), DeepSpeed (JSON), the Trainer or "
      "a "
      "script around it (TrainingArguments as JSON or YAML), axolotl (YAML) or fairseq (YAML or "
      "command line)");
}

template <class S>
void Put(ReadResult<S> result, const std::string& file, std::optional<S>& slot, RunSettings& run) {
  if (slot) {
    throw InputError(file, "a second file of the same kind as " + run.files.front(),
                     "one file of each kind");
  }
  slot = std::move(result.settings);
  for (const std::string& key : result.left_out) {
    run.left_out.push_back(file + ": " + key);
  }
  for (const std::string& key : result.unknown) {
    run.unknown.push_back(file + ": " + key);
  }
}

void PutTrainer(TrainerFile trainer, const std::string& file, RunSettings& run) {
  Put(std::move(trainer.result), file, run.trainer, run);
  run.script = std::move(trainer.script);
}

// --- Accelerate

constexpr std::array<std::string_view, 9> kAccelerateSpecial = {
    "fsdp_config.fsdp_reshard_after_forward",       "fsdp_config.fsdp_sharding_strategy",
    "fsdp_config.fsdp_backward_prefetch_policy",    "deepspeed_config.gradient_accumulation_steps",
    "deepspeed_config.gradient_clipping",           "deepspeed_config.zero_stage",
    "deepspeed_config.offload_optimizer_device",    "deepspeed_config.offload_param_device",
    "deepspeed_config.offload_optimizer_nvme_path",
};

// Version 1 takes the strategy by name or by number. What stands under the key of version 2 does
// not reach it: `accelerate launch` passes on its default, FULL_SHARD, which counts for more; and
// the older name of the prefetch policy does not reach it, either.
void ReadAccelerateFsdp(const JsonValue& fsdp, AccelerateSettings& s,
                        std::vector<std::string>& left_out) {
  constexpr std::array<std::string_view, 5> kByNumber = {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD",
                                                         "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"};
  if (const auto strategy = fsdp.Find("fsdp_sharding_strategy")) {
    s.fsdp_sharding_strategy =
        strategy->IsNumber()
            ? std::string(
                  kByNumber[static_cast<std::size_t>(strategy->AsInt(1, kByNumber.size()) - 1)])
            : strategy->AsString();
  }
  if (const auto reshard = fsdp.Find("fsdp_reshard_after_forward")) {
    if (s.fsdp_version.value_or(1) == 1) {
      left_out.emplace_back("fsdp_config.fsdp_reshard_after_forward");
    } else if (reshard->IsString() && reshard->AsString() != "true" &&
               reshard->AsString() != "false") {
      throw reshard->Error("true or false with fsdp_version 2");
    } else {
      s.fsdp_reshard_after_forward =
          reshard->IsString() ? reshard->AsString() == "true" : reshard->AsBool();
    }
  }
  if (fsdp.Find("fsdp_backward_prefetch_policy")) {
    left_out.emplace_back("fsdp_config.fsdp_backward_prefetch_policy");
  }
}

void ReadAccelerate(const JsonValue& root, const std::string& file, RunSettings& run) {
  auto result = ReadSettings<AccelerateSettings>(root, AccelerateRows(), AccelerateOthers(),
                                                 kAccelerateSpecial);
  AccelerateSettings& s = result.settings;
  if (s.mixed_precision == "yes") {
    throw root.At("mixed_precision").Error("no, bf16 or fp16");
  }
  if (s.mixed_precision) {
    s.mixed_precision = LowerCase(*s.mixed_precision);  // as `accelerate launch` does
  }
  if (const auto fsdp = root.Find("fsdp_config")) {
    ReadAccelerateFsdp(*fsdp, s, result.left_out);
  }
  const auto deepspeed = root.Find("deepspeed_config");
  const std::string type = s.distributed_type.value_or(deepspeed ? "DEEPSPEED" : "NO");
  constexpr std::array<std::string_view, 4> kTypes = {"FSDP", "MULTI_GPU", "DEEPSPEED", "NO"};
  if (std::find(kTypes.begin(), kTypes.end(), type) == kTypes.end()) {
    throw root.At("distributed_type").Error("FSDP, MULTI_GPU, DEEPSPEED or NO");
  }
  s.distributed_type = type;
  if (type == "DEEPSPEED" && deepspeed && !s.deepspeed_config_file) {
    ReadResult<DeepSpeedSettings> zero = ReadInlineDeepSpeed(*deepspeed);
    zero.left_out.clear();
    Put(std::move(zero), file, run.deepspeed, run);
  }
  Put(std::move(result), file, run.accelerate, run);
}

// --- torchtitan

// Names that its settings had until 2025. What they say is the same.
void ReadTorchtitan(const JsonValue& root, const std::string& file, RunSettings& run) {
  using S = TorchtitanSettings;
  std::vector<SettingRow<S>> rows(TorchtitanRows().begin(), TorchtitanRows().end());
  const std::array<SettingRow<S>, 8> old = {{
      {"training.batch_size", &S::local_batch_size},
      {"training.compile", &S::compile},
      {"training.data_parallel_degree", &S::data_parallel_shard_degree},
      {"training.data_parallel_shard_degree", &S::data_parallel_shard_degree},
      {"training.data_parallel_replicate_degree", &S::data_parallel_replicate_degree},
      {"float8.recipe_name", &S::float8_recipe},
      {"float8.filter_fqns", &S::float8_leaves_out},
      {"float8.enable_fsdp_float8_all_gather", &S::float8_gathers},
  }};
  rows.insert(rows.end(), old.begin(), old.end());
  constexpr std::array<std::string_view, 1> kSpecial = {"optimizer.fused"};
  auto result = ReadSettings<S>(root, rows, TorchtitanOthers(), kSpecial);
  S& s = result.settings;
  if (const auto optimizer = root.Find("optimizer"); optimizer && !s.implementation) {
    if (const auto fused = optimizer->Find("fused")) {
      s.implementation = fused->AsBool() ? "fused" : "foreach";
    }
  }
  if (s.converters) {
    std::replace(s.converters->begin(), s.converters->end(), std::string("float8"),
                 std::string("quantize.linear.float8"));
  }
  Put(std::move(result), file, run.torchtitan, run);
}

// --- fairseq

// max_tokens bounds a batch by tokens; with samples of equal length that is a number of samples.
void ReadFairseq(const JsonValue& root, const std::string& file, RunSettings& run) {
  auto result = ReadSettings<FairseqSettings>(root, FairseqRows(), FairseqOthers());
  FairseqSettings& s = result.settings;
  if (const auto dataset = root.Find("dataset"); dataset && !s.batch_size) {
    const auto max_tokens = dataset->Find("max_tokens");
    if (max_tokens && s.tokens_per_sample.value_or(0) > 0) {
      s.batch_size = std::max<std::int64_t>(1, max_tokens->AsInt(1) / *s.tokens_per_sample);
    }
  }
  Put(std::move(result), file, run.fairseq, run);
}

// The last word of a key is the flag; a table's "_name" goes by the table's name.
std::string FlagOf(std::string_view key) {
  if (key == "model._name") {
    return "arch";
  }
  const std::size_t dot = key.rfind('.');
  return std::string(key.ends_with("._name") ? key.substr(0, dot) : key.substr(dot + 1));
}

std::vector<SettingRow<FairseqSettings>> FairseqFlagRows(const std::vector<std::string>& flags) {
  std::vector<SettingRow<FairseqSettings>> rows;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    rows.push_back({flags[i], FairseqRows()[i].member});
  }
  return rows;
}

void ReadFairseqFlags(const JsonValue& root, const std::string& file, RunSettings& run) {
  std::vector<std::string> flags, others;
  for (const SettingRow<FairseqSettings>& row : FairseqRows()) {
    flags.push_back(FlagOf(row.key));
  }
  // fairseq's tasks and models bring hundreds of flags: all are taken but misspelt ones.
  std::vector<OtherKey> any;
  for (const std::string& key : root.Keys()) {
    if (std::find(flags.begin(), flags.end(), key) == flags.end()) {
      others.push_back(key);
    }
  }
  for (const std::string& key : others) {
    const std::string nearest = NearestMatch(key, flags);
    if (!nearest.empty() && IsMisspelt(nearest, key)) {
      throw root.At(key).Error("a flag of fairseq", "did you mean --" + nearest + "?");
    }
    any.push_back({key, key == "bf16" || key == "memory_efficient_bf16" ? "false" : ""});
  }
  const std::vector<SettingRow<FairseqSettings>> rows = FairseqFlagRows(flags);
  auto result = ReadSettings<FairseqSettings>(root, rows, any);
  FairseqSettings& s = result.settings;
  if (const auto tokens = root.Find("max_tokens"); tokens && !s.batch_size && s.tokens_per_sample) {
    s.batch_size = std::max<std::int64_t>(
        1, tokens->AsInt(1) / std::max<std::int64_t>(1, *s.tokens_per_sample));
  }
  Put(std::move(result), file, run.fairseq, run);
}

// --- all

void ReadOne(const std::string& file, RunSettings& run) {
  const JsonValue root = ReadDocument(file);
  run.files.push_back(file);
  switch (KindOf(root, file)) {
    case Kind::kTorchtitan:
      return ReadTorchtitan(root, file, run);
    case Kind::kFairseq:
      return ReadFairseq(root, file, run);
    case Kind::kFairseqFlags:
      return ReadFairseqFlags(root, file, run);
    case Kind::kAccelerate:
      return ReadAccelerate(root, file, run);
    case Kind::kTrainer:
      return PutTrainer(ReadTrainer(root), file, run);
    case Kind::kAxolotl:
      return PutTrainer(ReadAxolotl(root), file, run);
    case Kind::kDeepSpeed:
      return Put(ReadDeepSpeed(root), file, run.deepspeed, run);
  }
}

// A file that another one names, there or beside that one.
void ReadNamed(const std::string& name, const char* kind, RunSettings& run) {
  std::filesystem::path path(name);
  if (!Exists(path)) {
    path = std::filesystem::path(run.files.front()).parent_path() / path.filename();
  }
  if (!Exists(path)) {
    throw InputError(run.files.front(),
                     std::string(kind) + " file \"" + name + "\" that is not there",
                     "that file as a further argument");
  }
  ReadOne(path.string(), run);
}

void ReadNamedFiles(RunSettings& run) {
  if (!run.script.accelerate_file.empty() && !run.accelerate) {
    ReadNamed(run.script.accelerate_file, "an Accelerate", run);
  }
  if (run.accelerate && run.script.gpus_per_node > 0) {  // flags count more than the file
    const std::int64_t nodes =
        run.script.nodes > 0 ? run.script.nodes : run.accelerate->num_machines.value_or(1);
    run.accelerate->num_machines = nodes;
    run.accelerate->num_processes =
        run.script.gpus_per_node * std::max<std::int64_t>(1, run.script.nodes);
  }
  const std::optional<std::string> deepspeed =
      run.accelerate && run.accelerate->deepspeed_config_file
          ? run.accelerate->deepspeed_config_file
      : run.trainer ? run.trainer->deepspeed
                    : std::nullopt;
  if (deepspeed && !run.deepspeed) {
    ReadNamed(*deepspeed, "a DeepSpeed", run);
  }
}

void CheckTogether(const RunSettings& run) {
  const bool hf = run.accelerate || run.trainer || run.deepspeed;
  if (int(run.torchtitan.has_value()) + int(run.fairseq.has_value()) + int(hf) > 1) {
    throw InputError(run.files.back(), "settings of a second framework",
                     "one run: torchtitan's, fairseq's, or Accelerate's, the Trainer's and "
                     "DeepSpeed's");
  }
  if (run.deepspeed && run.deepspeed->bf16.value_or(false) && run.deepspeed->fp16.value_or(false)) {
    throw InputError(run.files.back(), "bf16 and fp16", "one of them");
  }
  if (run.trainer && run.trainer->gradient_checkpointing.value_or(false) && run.accelerate &&
      run.accelerate->fsdp_activation_checkpointing.value_or(false) &&
      !run.script.recomputes_by_itself) {
    throw InputError(run.files.back() + ": gradient_checkpointing", "true",
                     "false beside fsdp_activation_checkpointing, as the Trainer demands");
  }
  if (!run.trainer || !run.deepspeed) {
    return;
  }
  const auto differ = [&](const char* key, const auto& a, const auto& b) {
    if (a && b && *a != *b) {
      throw InputError(run.files.back() + ": " + key, std::to_string(*b),
                       std::to_string(*a) + ", as " + run.files.front() + " says");
    }
  };
  differ("train_micro_batch_size_per_gpu", run.trainer->per_device_train_batch_size,
         run.deepspeed->train_micro_batch_size_per_gpu);
  differ("gradient_accumulation_steps", run.trainer->gradient_accumulation_steps,
         run.deepspeed->gradient_accumulation_steps);
  differ("bf16.enabled", run.trainer->bf16, run.deepspeed->bf16);
  differ("fp16.enabled", run.trainer->fp16, run.deepspeed->fp16);
}

std::string NameOfFrameworks(const RunSettings& run) {
  std::string name;
  const auto add = [&](bool has, const char* part) {
    name += has ? (name.empty() ? "" : " + ") + std::string(part) : std::string();
  };
  add(run.torchtitan.has_value(), "torchtitan");
  add(run.fairseq.has_value(), "fairseq");
  add(run.accelerate.has_value(), "Accelerate");
  add(run.trainer.has_value(), "Trainer");
  add(run.deepspeed.has_value(), "DeepSpeed");
  return name;
}

// torchtitan's llama3 is Llama 3.1.
std::string ZooModel(const TorchtitanSettings& s) {
  if (!s.model_name || !s.model_flavor) {
    return "";
  }
  return (*s.model_name == "llama3" ? "llama-3.1" : *s.model_name) + "-" +
         LowerCase(*s.model_flavor);
}

// Without Accelerate and the Trainer nobody fills it in.
bool HasAutoPrecision(const DeepSpeedSettings& s) {
  const auto is_auto = [&](const char* key) {
    return std::find(s.autos.begin(), s.autos.end(), key) != s.autos.end();
  };
  return !s.bf16 && !s.fp16 && (is_auto("bf16.enabled") || is_auto("fp16.enabled"));
}

// Of Liger and the compiler together what Liger does counts more: it decides about the logits.
std::string StackOf(const RunSettings& run) {
  if (run.trainer && run.trainer->use_liger_kernel.value_or(false)) {
    return "hf-liger";
  }
  if (run.trainer && run.trainer->torch_compile.value_or(false)) {
    return "torch-compile";
  }
  return run.deepspeed ? "deepspeed" : "hf-eager";
}

}  // namespace

RunSettings ReadRun(std::span<const std::string> files) {
  RunSettings run;
  for (const std::string& file : files) {
    ReadOne(file, run);
  }
  ReadNamedFiles(run);
  CheckTogether(run);
  run.framework = NameOfFrameworks(run);
  return run;
}

RunFacts FactsOf(const RunSettings& run) {
  RunFacts facts;
  if (run.torchtitan) {
    facts.sequence_length = run.torchtitan->seq_len.value_or(2048);
    facts.model = ZooModel(*run.torchtitan);
    facts.kernel_set = run.torchtitan->compile.value_or(false) ? "torch-compile" : "torch-eager";
    facts.has_micro_batch = facts.has_accumulation = true;
    facts.has_optimizer = facts.has_recompute = facts.has_precision = true;
    return facts;
  }
  if (run.fairseq) {
    facts.sequence_length = run.fairseq->tokens_per_sample.value_or(0);
    facts.kernel_set = "torch-2022";
    facts.has_micro_batch = run.fairseq->batch_size.has_value();
    facts.has_accumulation = facts.has_optimizer = facts.has_recompute = true;
    facts.has_precision = true;
    return facts;
  }
  facts.kernel_set = StackOf(run);
  facts.model = run.script.model;
  facts.sequence_length = run.script.sequence_length;
  facts.attention = run.script.attention;
  facts.nodes = run.script.nodes;
  facts.gpus_per_node = run.script.gpus_per_node;
  facts.has_micro_batch =
      run.trainer || (run.deepspeed && run.deepspeed->train_micro_batch_size_per_gpu);
  facts.has_accumulation = run.trainer || run.deepspeed;
  facts.has_optimizer = run.trainer || (run.deepspeed && run.deepspeed->optimizer);
  facts.has_precision = run.trainer || run.accelerate || !HasAutoPrecision(*run.deepspeed);
  facts.has_recompute =
      run.trainer.has_value() || (run.accelerate && run.accelerate->distributed_type == "FSDP");
  if (run.accelerate) {
    facts.nodes = run.accelerate->num_machines.value_or(1);
    const std::int64_t processes = run.accelerate->num_processes.value_or(0);
    if (facts.nodes < 1 || processes % facts.nodes != 0 || processes < 0) {
      throw InputError(run.files.front() + ": num_processes", std::to_string(processes),
                       "a multiple of num_machines, " + std::to_string(facts.nodes));
    }
    facts.gpus_per_node = processes / facts.nodes;
  }
  return facts;
}

}  // namespace shardwright
