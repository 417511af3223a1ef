#pragma once

// TrainingArguments of the Hugging Face Trainer as a JSON file (HfArgumentParser.parse_json_file),
// as transformers 5.23 reads it.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/emitters/hf_fsdp.h"
#include "planner/emitters/settings.h"

namespace shardwright {

struct TrainerSettings {
  std::optional<std::string> output_dir;
  std::optional<std::int64_t> per_device_train_batch_size;
  std::optional<std::int64_t> gradient_accumulation_steps;
  std::optional<bool> bf16;
  std::optional<bool> fp16;
  std::optional<std::string> optim;  // adamw_torch, adamw_torch_fused, sgd
  std::optional<double> weight_decay;
  std::optional<double> max_grad_norm;  // 0: no clipping
  std::optional<bool> gradient_checkpointing;
  std::optional<bool> use_liger_kernel;
  std::optional<bool> torch_compile;
  std::optional<std::int64_t> context_size;  // ranks that cut tokens
  std::optional<std::string> deepspeed;      // the path of a DeepSpeed configuration
  std::optional<bool> fsdp;
  std::optional<std::int64_t> version;
  std::optional<std::string> auto_wrap_policy;
  std::optional<std::vector<std::string>> transformer_layer_cls_to_wrap;
  std::optional<std::int64_t> min_num_params;
  std::optional<bool> reshard_after_forward;     // version 2
  std::optional<std::string> sharding_strategy;  // version 1, under the same key
  std::optional<bool> cpu_offload;
  std::optional<bool> activation_checkpointing;
  std::optional<std::string> backward_prefetch;  // version 1, lower case
  std::optional<bool> forward_prefetch;          // version 1
  std::optional<bool> use_orig_params;           // version 1
  std::optional<bool> limit_all_gathers;         // version 1
  std::optional<std::string> state_dict_type;
  std::optional<bool> sync_each_batch;
  std::optional<bool> find_unused_parameters;  // DDP
  std::optional<bool> static_graph;            // DDP
  std::optional<std::int64_t> bucket_cap_mb;   // DDP: of all buckets, the first among them
};

// The key fsdp_config.reshard_after_forward stands twice: a boolean for version 2, a string for 1.
[[nodiscard]] std::span<const SettingRow<TrainerSettings>> TrainerRows();

// Settings of job and plan outside fsdp_config, and the way back; ApplyTrainer changes batch,
// accumulation, sync, precision, optimizer and clipping of a plan whose units are already applied.
[[nodiscard]] TrainerSettings ToTrainer(const HfFsdp& fsdp, const PlanFile& file);
// Throws InputError for a value that the Trainer refuses; `where` names the file.
[[nodiscard]] HfFsdp FromTrainer(const TrainerSettings& settings, const std::string& where);
void ApplyTrainer(const TrainerSettings& settings, PlanFile& file);
// Its part about the optimizer, which DeepSpeed leaves to the Trainer where it has none.
void ApplyTrainerOptimizer(const TrainerSettings& settings, Job& job);

}  // namespace shardwright
