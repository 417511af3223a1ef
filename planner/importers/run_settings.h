#pragma once

// A training run that somebody already has, as the settings files of its framework say it.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/emitters/accelerate.h"
#include "planner/emitters/deepspeed.h"
#include "planner/emitters/torchtitan.h"
#include "planner/emitters/trainer.h"
#include "schedule/plan_file.h"

namespace shardwright {

// A setting that no file has, and the value that the framework takes for it.
struct Assumption {
  std::string key;
  std::string value;
};

// LoRA as the file of a script says it. Rank 0: none.
struct Adapters {
  std::int64_t rank = 0;
  double alpha = 0.0;
  double dropout = 0.0;
  // As --lora-targets has them, also globs that match nothing ("all-linear" among them); empty: as
  // PEFT chooses for the model.
  std::vector<std::string> targets;
  std::vector<std::string> saved;  // PEFT's modules_to_save
  bool has_magnitudes = false;     // DoRA
  FrozenFormat base = FrozenFormat::kParam;
  bool quantizes_experts = false;

  bool operator==(const Adapters&) const = default;
};

// What a recipe of NeMo Automodel says beside the Trainer's words.
struct AutomodelFacts {
  bool is_own = false;  // the model is Automodel's own code, not transformers'
  // Sizes of the mesh, with the fewest shards, and the pipeline's schedule and micro-batch.
  Plan mesh;
  std::int64_t stage_layers = 0;  // of a pipeline; 0: not said
  std::string stage_round;        // "up", "down": stages to a multiple of its ranks
  std::int64_t ranks = 0;         // 0: as many as there are
  std::optional<bool> reshards;   // after forward; none: all but the last layer, no mixture's
  bool prefetches = false;        // layers name those to gather early
  bool recomputes = false;
  DType master = DType::kBf16;  // of weights as they were loaded, and so of states
  OptimizerSpec optimizer;
  Fp8Products fp8 = Fp8Products::kNone;
  bool keeps_gathered = false;  // parameters of mixtures, over the micro-batches of a step
  bool fp32_logits = true;      // in the loss
};

// Each as a file has it, and as globs.
using Patterns = std::vector<std::pair<std::string, std::vector<std::string>>>;

// LLaMA-Factory's "freeze": what learns of the last layers, or of the first ones if `count` is
// negative, and of what lies outside them.
struct LearningLayers {
  std::int64_t count = 0;
  std::vector<std::string> modules;  // of a layer: how their names begin; "all"
  std::vector<std::string> outside;  // parts of names
};

// What the file of a script around the Trainer says beside the Trainer's arguments; 0 and empty:
// not said.
struct ScriptFacts {
  std::string model;   // a folder, or a name of the Hugging Face hub
  std::string config;  // the text of a config.json, where arguments say the model
  std::map<std::string, std::string> plan_flags;  // of `shardwright plan`, where they say the plan
  std::string stack;                              // the kernel set; empty: of the framework
  std::int64_t sequence_length = 0;               // the longest; samples are padded or packed to it
  std::string attention;                          // as --attention; empty: the kernel set's own
  bool has_bf16_weights = false;                  // before anybody makes others of them
  std::vector<std::string> fp32_masters;  // of which somebody makes fp32, as Job::fp32_masters
  bool recomputes_by_itself = false;      // the Trainer does not know of it
  bool offloads_activations = false;      // what is kept for backward waits on the host
  std::int64_t loss_rows = 0;             // head and loss run over so many at a time
  std::int64_t loss_chunks = 0;           // or in so many chunks; both 0: as the kernel set has it
  std::int64_t dp_shard = 0;              // axolotl's mesh
  std::int64_t dp_replicate = 0;
  ContextMethod context_method = ContextMethod::kRingGather;  // where ranks cut tokens
  std::string accelerate_file;  // that `accelerate launch` is told to read
  std::int64_t nodes = 0;
  std::int64_t gpus_per_node = 0;
  Adapters adapters;
  bool is_llamafactory_v1 = false;
  std::optional<AutomodelFacts> automodel;
  std::int64_t global_batch = 0;         // of trainers of their own: samples of a step on all ranks
  bool has_bf16_adapters = false;        // otherwise fp32 (PEFT's autocast_adapter_dtype)
  TrainsBy trains_by = TrainsBy::kOwn;   // batch sizes of a file count pairs
  Rollout rollout;                       // of GRPO
  Patterns learns;                       // of names of what is not frozen; empty: all
  std::optional<LearningLayers> layers;  // the same by number
  std::vector<Assumption> assumed;       // the script's own defaults

  // Neither the Trainer nor Accelerate wraps the model.
  [[nodiscard]] bool HasOwnTrainer() const { return is_llamafactory_v1 || automodel; }
};

// One file of each kind at most; a run is torchtitan's, or some of the other three.
struct RunSettings {
  std::optional<TorchtitanSettings> torchtitan;
  std::optional<AccelerateSettings> accelerate;
  std::optional<TrainerSettings> trainer;
  std::optional<DeepSpeedSettings> deepspeed;
  std::optional<Adapters> peft;  // of adapter_config.json
  std::string peft_file;
  ScriptFacts script;
  std::string framework;           // "torchtitan", "accelerate + deepspeed", ...
  std::string target;              // of emit, that writes such settings
  std::vector<std::string> files;  // those read
  std::string trainer_file;        // those of them that may name others
  std::string accelerate_file;
  std::vector<std::string> left_out;  // "<file>: <key>" of known keys that change nothing here
  std::vector<std::string> unknown;   // the same of keys that nobody here knows
};

// What a plan must be made with before the settings can be applied to it; 0 and empty: not said.
struct RunFacts : ScriptFacts {
  std::string kernel_set;         // the stack that the framework runs on
  bool has_micro_batch = false;   // otherwise the user's script decides
  bool has_accumulation = false;  // the same
  bool has_optimizer = false;     // the same
  bool has_recompute = false;     // the same
  bool has_precision = false;     // otherwise DeepSpeed's file says "auto" and no other file does
};

// Reads torchtitan's TOML, Accelerate's YAML or JSON, DeepSpeed's JSON, TrainingArguments as JSON
// or YAML, also among those of TRL's or LLaMA-Factory's scripts, axolotl's and NeMo Automodel's
// YAML, Megatron-LM's arguments, and PEFT's adapter_config.json beside them; which of them a file
// is, its keys tell. A file that another one names is looked for beside that one, then where the
// program runs. Throws InputError for keys that the framework does not have, values that it
// refuses, features that cannot be predicted, and files that contradict each other.
[[nodiscard]] RunSettings ReadRun(std::span<const std::string> files);

// Before anything is multiplied or divided by them: ranks x samples x steps stay inside 64 bits.
// Throws InputError; ReadRun calls it.
void CheckSizes(const RunSettings& run);

[[nodiscard]] RunFacts FactsOf(const RunSettings& run);

// Changes job and plan of `file` to what the framework makes of the settings on its cluster. Throws
// InputError for settings that do not fit the cluster.
void ApplyRun(const RunSettings& run, PlanFile& file);

// After ApplyRun.
[[nodiscard]] std::vector<Assumption> AssumptionsOf(const RunSettings& run, const PlanFile& file);

}  // namespace shardwright
