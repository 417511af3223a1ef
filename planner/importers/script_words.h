#pragma once

// Words that several scripts around the Trainer have in common: FSDP's, lengths, attention, and
// what is trained on.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

#include "core/json.h"
#include "planner/importers/read_trainer.h"

namespace shardwright {

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
