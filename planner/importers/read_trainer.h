#pragma once

// TrainingArguments, alone or among the keys of a script around the Trainer: TRL's and the
// alignment handbook's recipes, LLaMA-Factory's, and axolotl's, which has names of its own.

#include <optional>

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

}  // namespace shardwright
