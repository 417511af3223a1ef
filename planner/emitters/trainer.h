#pragma once

// TrainingArguments of the Hugging Face Trainer as a JSON file (HfArgumentParser.parse_json_file),
// as transformers 5.23 reads it.

#include <string>

#include "planner/emitters/framework_settings.h"
#include "planner/emitters/hf_fsdp.h"

namespace shardwright {

// The key fsdp_config.reshard_after_forward has two members: a switch of version 2, a text of 1.

// Settings of job and plan outside fsdp_config, and the way back; ApplyTrainer changes batch,
// accumulation, sync, precision, optimizer and clipping of a plan whose units are already applied.
[[nodiscard]] TrainerSettings ToTrainer(const HfFsdp& fsdp, const PlanFile& file);
// Throws InputError for a value that the Trainer refuses; `where` names the file.
[[nodiscard]] HfFsdp FromTrainer(const TrainerSettings& settings, const std::string& where);
void ApplyTrainer(const TrainerSettings& settings, PlanFile& file);
// Its part about the optimizer, which DeepSpeed leaves to the Trainer where it has none.
void ApplyTrainerOptimizer(const TrainerSettings& settings, Job& job);

}  // namespace shardwright
