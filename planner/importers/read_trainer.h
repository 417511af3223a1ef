#pragma once

// TrainingArguments, alone or among the keys of a script around the Trainer: TRL's and the
// alignment handbook's recipes, LLaMA-Factory's, and axolotl's, which has names of its own.

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "core/json.h"
#include "planner/emitters/trainer.h"
#include "planner/importers/read_settings.h"
#include "planner/importers/run_settings.h"

namespace shardwright {

struct TrainerFile {
  ReadResult<TrainerSettings> result;
  ScriptFacts script;
};

// Throws InputError for what the Trainer refuses, and for what cannot be predicted: DoRA,
// training against a second model, optimizers that no table knows.
// `fsdp_config`: the table of that name, from the file that the key names instead.
[[nodiscard]] TrainerFile ReadTrainer(const JsonValue& root,
                                      const std::optional<JsonValue>& fsdp_config);
[[nodiscard]] TrainerFile ReadAxolotl(const JsonValue& root);
// LLaMA-Factory's version 1, whose trainer is its own.
[[nodiscard]] TrainerFile ReadLlamaFactoryV1(const JsonValue& root);
// NVIDIA NeMo Automodel's, which wraps the model itself, too.
[[nodiscard]] TrainerFile ReadAutomodel(const JsonValue& root);
void ApplyAutomodel(const AutomodelFacts& facts, const std::string& where, PlanFile& file);

// Freezes the parameters that no pattern of the script names, if it has any. Throws InputError, at
// `where`, for a pattern that is found in no name.
void ApplyUnfrozen(const ScriptFacts& script, const std::string& where, PlanFile& file);

// Head and loss over so many rows at a time: TRL's chunked loss (_CHUNKED_LM_HEAD_CHUNK_SIZE); the
// kernels of Cut Cross Entropy hold fewer.
inline constexpr std::int64_t kLossRows = 256;

// --- What readers of scripts share, in read_trainer.cc

using Keys = std::initializer_list<std::string_view>;

// The first of these keys that the file has.
[[nodiscard]] std::optional<JsonValue> FindOne(const JsonValue& root, Keys keys);
[[nodiscard]] bool IsOn(const JsonValue& root, std::string_view key);
// 0: none of the keys is there.
[[nodiscard]] std::int64_t LengthOf(const JsonValue& root, Keys keys);
// As --attention has it; empty: as the kernel set has it.
[[nodiscard]] std::string AttentionOf(const JsonValue& root, Keys keys);
// Throws InputError for a value that is none of `values`.
void Demand(const JsonValue& value, Keys values, std::string_view expected);

// LLaMA-Factory's "freeze" (hparams/finetuning_args.py, FreezeArguments).
[[nodiscard]] LearningLayers ReadLearningLayers(const JsonValue& table);

void ReadFsdp(const JsonValue& root, TrainerSettings& s);
void ReadSingles(const JsonValue& root, TrainerFile& file);
void ReadRewards(TrainerFile& file);
void ReadPreferences(const JsonValue& root, std::string_view loss_key, TrainerFile& file);
// `engine`: the part of the memory that the engine has unless the file says another.
void ReadCompletions(const JsonValue& root, double engine, TrainerFile& file);

// Throws InputError for optimizers that no table knows, and for what the Trainer refuses.
void CheckOptimizer(const JsonValue& root, std::string_view key, const TrainerSettings& s);
void CheckTrainer(const JsonValue& root, ReadResult<TrainerSettings>& result);

}  // namespace shardwright
