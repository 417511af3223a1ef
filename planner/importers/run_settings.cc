#include "planner/importers/run_settings.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <utility>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "planner/importers/document.h"
#include "planner/importers/read_adapters.h"
#include "planner/importers/read_deepspeed.h"
#include "planner/importers/read_megatron.h"
#include "planner/importers/read_settings.h"
#include "planner/importers/read_trainer.h"
#include "planner/importers/setting_keys.h"

namespace shardwright {
namespace {

template <class S>
void Put(ReadResult<S> result, const std::string& file, std::optional<S>& slot, RunSettings& run) {
  if (slot) {
    throw InputError(file, "a second file of the same kind as " + run.files.front(),
                     "one file of each kind");
  }
  slot = std::move(result.settings);
  for (const auto& [key, taken_for] : result.said) {
    run.script.assumed.push_back({key, taken_for});
  }
  for (const std::string& key : result.left_out) {
    run.left_out.push_back(file + ": " + key);
  }
  for (const std::string& key : result.unknown) {
    run.unknown.push_back(file + ": " + key);
  }
}

void PutTrainer(TrainerFile trainer, const std::string& file, RunSettings& run) {
  run.trainer_file = file;
  const std::vector<Assumption> earlier = std::move(run.script.assumed);  // of other files
  run.script = std::move(trainer.script);
  run.script.assumed.insert(run.script.assumed.begin(), earlier.begin(), earlier.end());
  Put(std::move(trainer.result), file, run.trainer, run);
}

// --- Accelerate

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
  auto result =
      ReadSettings<AccelerateSettings>(root, AccelerateRows(), SettingKeys::Of("accelerate"));
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
    throw root.At("distributed_type")
        .Error("FSDP, MULTI_GPU, DEEPSPEED or NO, since " + type + " cannot be predicted");
  }
  s.distributed_type = type;
  if (type == "DEEPSPEED" && deepspeed && !s.deepspeed_config_file) {
    ReadResult<DeepSpeedSettings> zero = ReadInlineDeepSpeed(*deepspeed);
    zero.left_out.clear();
    Put(std::move(zero), file, run.deepspeed, run);
  }
  run.accelerate_file = file;
  Put(std::move(result), file, run.accelerate, run);
}

// --- torchtitan

bool Compiles(const TorchtitanSettings& s, const char* component) {
  return s.compile.value_or(false) && (!s.components || IsIn(*s.components, component));
}

// Until April 2025 [training] compile was about the blocks, and the loss was eager.
void ReadTorchtitan(const JsonValue& root, const std::string& file, RunSettings& run) {
  using S = TorchtitanSettings;
  auto result = ReadSettings<S>(root, TorchtitanRows(), SettingKeys::Of("torchtitan"));
  S& s = result.settings;
  if (const auto optimizer = root.Find("optimizer"); optimizer && !s.implementation) {
    if (const auto fused = optimizer->Find("fused")) {
      s.implementation = fused->AsBool() ? "fused" : "foreach";
    }
  }
  const auto training = root.Find("training");
  if (training && training->Find("compile")) {
    s.components = {"model"};
  }
  if (s.enable_async_tensor_parallel.value_or(false) && !Compiles(s, "model")) {
    throw InputError(file + ": parallelism.enable_async_tensor_parallel", "true",
                     "false where the model is not compiled, as torchtitan demands");
  }
  if (s.components && s.compile.value_or(false) && !Compiles(s, "model")) {
    run.script.assumed.push_back({"compile.components", "as nothing compiled, the loss neither"});
  }
  if (s.converters) {
    std::replace(s.converters->begin(), s.converters->end(), std::string("float8"),
                 std::string("quantize.linear.float8"));
  }
  Put(std::move(result), file, run.torchtitan, run);
}

// --- all

// A file that another one names: beside that one, under its path or its name alone, or where the
// program runs.
std::string FindNamed(const std::string& name, const char* kind, const std::string& named_by) {
  const std::filesystem::path folder = std::filesystem::path(named_by).parent_path();
  const std::filesystem::path path(name);
  for (const std::filesystem::path& place : {folder / path, folder / path.filename(), path}) {
    if (Exists(place)) {
      return place.string();
    }
  }
  throw InputError(named_by, std::string(kind) + " file \"" + name + "\" that is not there",
                   "that file as a further argument");
}

// The Trainer takes a table, a JSON text of it (which the document then holds) or a file's name.
std::optional<JsonValue> NamedFsdpConfig(const JsonValue& root, const std::string& file) {
  const auto name = root.Find("fsdp_config");
  if (!name || !name->IsString()) {
    return std::nullopt;
  }
  constexpr std::int64_t kLargest = std::int64_t{1} << 20;
  const std::string path = FindNamed(name->AsString(), "an fsdp_config", file);
  const std::string text = ReadTextFile(path, kLargest);
  (void)JsonValue::Parse(text, path);  // one value, and not the end of the table around it
  return JsonValue::Parse("{\"fsdp_config\": " + text + "}", path);
}

// PEFT's file, which saved adapters have and scripts make of their own code.
void ReadPeft(const JsonValue& root, const std::string& file, RunSettings& run) {
  std::optional<TrainerSettings> none;
  Put(ReadSettings<TrainerSettings>(root, TrainerRows(), SettingKeys::Of("peft")), file, none, run);
  if (run.peft) {
    throw InputError(file, "a second file of adapters", "one file of each kind");
  }
  run.peft = ReadAdapters(root, "peft", FrozenFormat::kMaster);
  run.peft_file = file;
}

// Adapters of a file of their own, on what the script loads.
void PlaceAdapters(RunSettings& run) {
  if (!run.peft) {
    return;
  }
  if (!run.trainer && !run.accelerate && !run.deepspeed) {
    throw InputError(run.peft_file, "adapters alone",
                     "files of Accelerate, DeepSpeed, the Trainer or a script beside it");
  }
  if (run.script.adapters.rank > 0) {
    throw InputError(run.peft_file, "adapters", "none beside those of " + run.trainer_file);
  }
  run.script.adapters = *run.peft;
  run.script.adapters.base =
      run.script.has_bf16_weights ? FrozenFormat::kParam : FrozenFormat::kMaster;
}

// Its arguments say all: no other file stands beside them.
void ReadMegatronRun(const JsonValue& root, const std::string& file, RunSettings& run) {
  std::optional<TrainerSettings> none;
  TrainerFile megatron = ReadMegatron(root);
  run.script = std::move(megatron.script);
  Put(std::move(megatron.result), file, none, run);
}

template <TrainerFile (*kReader)(const JsonValue& root)>
void ReadScriptFile(const JsonValue& root, const std::string& file, RunSettings& run) {
  PutTrainer(kReader(root), file, run);
}

using Read = void (*)(const JsonValue& root, const std::string& file, RunSettings& run);
constexpr std::array<std::pair<std::string_view, Read>, 9> kReaders = {{
    {"torchtitan", ReadTorchtitan},
    {"accelerate", ReadAccelerate},
    {"trainer",
     [](const JsonValue& root, const std::string& file, RunSettings& run) {
       PutTrainer(ReadTrainer(root, NamedFsdpConfig(root, file)), file, run);
     }},
    {"axolotl", ReadScriptFile<ReadAxolotl>},
    {"llamafactory-v1", ReadScriptFile<ReadLlamaFactoryV1>},
    {"automodel", ReadScriptFile<ReadAutomodel>},
    {"megatron", ReadMegatronRun},
    {"peft", ReadPeft},
    {"deepspeed", [](const JsonValue& root, const std::string& file,
                     RunSettings& run) { Put(ReadDeepSpeed(root), file, run.deepspeed, run); }},
}};

// The framework is told by keys at the top that only its files have.
void ReadOne(const std::string& file, RunSettings& run) {
  const JsonValue root = ReadDocument(file);
  run.files.push_back(file);
  for (const auto& [key, framework] : SettingKeys::Marks()) {
    if (!root.Find(key)) {
      continue;
    }
    for (const auto& [name, read] : kReaders) {
      if (name == framework) {
        return read(root, file, run);
      }
    }
  }
  throw InputError(
      file, "no key that tells the framework",
      "settings of torchtitan (TOML), Accelerate (YAML or JSON), DeepSpeed (JSON), the Trainer or "
      "a script around it (TrainingArguments as JSON or YAML), axolotl or NeMo Automodel (YAML), "
      "or "
      "PEFT's adapter_config.json, or Megatron-LM's arguments as a command line or YAML");
}

void ReadNamedFiles(RunSettings& run) {
  if (!run.script.accelerate_file.empty() && !run.accelerate) {
    ReadOne(FindNamed(run.script.accelerate_file, "an Accelerate", run.trainer_file), run);
  }
  if (run.accelerate && run.script.gpus_per_node > 0) {  // flags count more than the file
    const std::int64_t nodes =
        run.script.nodes > 0 ? run.script.nodes : run.accelerate->num_machines.value_or(1);
    run.accelerate->num_machines = nodes;
    run.accelerate->num_processes =
        run.script.gpus_per_node * std::max<std::int64_t>(1, run.script.nodes);
  }
  if (run.deepspeed) {
    return;
  }
  if (run.accelerate && run.accelerate->deepspeed_config_file) {
    ReadOne(FindNamed(*run.accelerate->deepspeed_config_file, "a DeepSpeed", run.accelerate_file),
            run);
  } else if (run.trainer && run.trainer->deepspeed) {
    ReadOne(FindNamed(*run.trainer->deepspeed, "a DeepSpeed", run.trainer_file), run);
  }
}

void CheckTogether(const RunSettings& run) {
  const bool hf = run.accelerate || run.trainer || run.deepspeed;
  if (!run.script.plan_flags.empty() && (hf || run.torchtitan)) {
    throw InputError(run.files.back(), "settings of a second framework",
                     "Megatron-LM's arguments alone");
  }
  if (run.torchtitan && hf) {
    throw InputError(run.files.back(), "settings of a second framework",
                     "one run: torchtitan's, or Accelerate's, the Trainer's and DeepSpeed's");
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
  add(!run.script.plan_flags.empty(), "Megatron-LM");
  add(run.torchtitan.has_value(), "torchtitan");
  add(run.accelerate.has_value(), "Accelerate");
  add(run.trainer && !run.script.automodel, "Trainer");
  add(run.script.automodel.has_value(), "NeMo Automodel");
  add(run.deepspeed.has_value(), "DeepSpeed");
  return name;
}

// torchtitan's llama3 is Llama 3.1.
std::string ZooModel(const TorchtitanSettings& s) {
  if (!s.model_name || !s.model_flavor) {
    return "";
  }
  std::string name =
      (*s.model_name == "llama3" ? "llama-3.1" : *s.model_name) + "-" + LowerCase(*s.model_flavor);
  std::replace(name.begin(), name.end(), '_', '-');
  return name;
}

// Without Accelerate and the Trainer nobody fills it in.
bool HasAutoPrecision(const DeepSpeedSettings& s) {
  const auto is_auto = [&](const char* key) { return IsIn(s.autos, key); };
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
  return run.deepspeed                                          ? "deepspeed"
         : run.script.automodel && run.script.automodel->is_own ? "torch-eager"
                                                                : "hf-eager";
}

}  // namespace

RunSettings ReadRun(std::span<const std::string> files) {
  RunSettings run;
  for (const std::string& file : files) {
    ReadOne(file, run);
  }
  ReadNamedFiles(run);
  CheckTogether(run);
  PlaceAdapters(run);
  CheckSizes(run);
  run.framework = NameOfFrameworks(run);
  run.target = run.script.HasOwnTrainer() || !run.script.plan_flags.empty()
                   ? ""  // no emitter writes its settings
               : run.torchtitan                                    ? "torchtitan"
               : run.deepspeed                                     ? "deepspeed"
               : run.accelerate                                    ? "accelerate"
               : run.script.dp_shard + run.script.dp_replicate > 0 ? "accelerate"  // has meshes
                                                                   : "trainer";
  return run;
}

RunFacts FactsOf(const RunSettings& run) {
  RunFacts facts;
  static_cast<ScriptFacts&>(facts) = run.script;
  if (run.torchtitan) {
    facts.sequence_length = run.torchtitan->seq_len.value_or(2048);
    facts.model = ZooModel(*run.torchtitan);
    facts.kernel_set = !Compiles(*run.torchtitan, "model") ? "torch-eager"
                       : Compiles(*run.torchtitan, "loss") ? "torch-compile"
                                                           : "torch-compile-2024";
    facts.has_micro_batch = facts.has_accumulation = true;
    facts.has_optimizer = facts.has_recompute = facts.has_precision = true;
    return facts;
  }
  if (!run.script.plan_flags.empty()) {
    facts.kernel_set = run.script.stack;
    facts.has_micro_batch = facts.has_accumulation = true;
    facts.has_optimizer = facts.has_recompute = facts.has_precision = true;
    return facts;
  }
  facts.kernel_set = StackOf(run);
  if (run.script.loss_rows > 0) {
    const std::int64_t micro = run.trainer->per_device_train_batch_size.value_or(8) *
                               SamplesPerExample(run.script.trains_by);
    constexpr std::int64_t kMost = std::int64_t{1} << 20;  // as --loss-chunks
    const std::int64_t completion = facts.rollout.completion;
    const std::int64_t tokens = completion > 0 ? completion : facts.sequence_length;
    facts.loss_chunks = std::clamp<std::int64_t>(tokens * micro / facts.loss_rows, 2, kMost);
  }
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
