#pragma once

// DeepSpeed's JSON configuration (deepspeed.initialize(config=...)), as version 0.19 reads it.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/emitters/settings.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct DeepSpeedSettings {
  std::optional<std::int64_t> train_batch_size;  // of all ranks and one step
  std::optional<std::int64_t> train_micro_batch_size_per_gpu;
  std::optional<std::int64_t> gradient_accumulation_steps;
  std::optional<double> gradient_clipping;  // 0: none
  std::optional<bool> bf16;
  std::optional<bool> fp16;
  std::optional<std::string> communication_data_type;  // fp32, bf16, fp16
  std::optional<std::string> optimizer;                // Adam, AdamW, SGD, Adadelta
  std::optional<double> learning_rate;
  std::optional<double> weight_decay;
  std::optional<double> momentum;
  std::optional<bool> torch_adam;  // PyTorch's Adam instead of DeepSpeed's fused one
  std::optional<std::int64_t> stage;
  std::optional<std::string> offload_optimizer;  // cpu or none: where masters and states are
  std::optional<bool> offload_optimizer_pinned;
  std::optional<std::string> offload_param;  // the same of the partitions that are gathered
  std::optional<bool> offload_param_pinned;
  std::optional<bool> contiguous_gradients;
  std::optional<bool> overlap_comm;
  std::optional<bool> reduce_scatter;  // of stage 3; stages 1 and 2 reduce alike either way
  std::optional<std::int64_t> reduce_bucket_size;     // elements, as all sizes below
  std::optional<std::int64_t> allgather_bucket_size;  // stages 1 and 2
  std::optional<std::int64_t> prefetch_bucket_size;   // stage 3
  std::optional<std::int64_t> param_persistence_threshold;
  std::optional<std::int64_t> max_live_parameters;
  std::optional<std::int64_t> max_reuse_distance;
  std::optional<std::int64_t> sub_group_size;
  std::optional<std::int64_t> mics_shard_size;  // ranks that share one copy; before 0.19.8
  std::optional<std::vector<std::string>> leaf_module_classes;  // fetched as a whole
  // Keys that say "auto", which Accelerate and the Trainer fill in. Not part of the file.
  std::vector<std::string> autos;
};

[[nodiscard]] std::span<const SettingRow<DeepSpeedSettings>> DeepSpeedRows();

// The nearest settings of a plan of any dialect. zero1 and zero2 keep their stage, ddp is stage 0,
// the rest is stage 3.
[[nodiscard]] DeepSpeedSettings ToDeepSpeed(const PlanFile& file);

// The modules that stage 3 fetches: leaf modules, of these classes, as a whole, the others one by
// one.
[[nodiscard]] std::vector<UnitPlan> FetchedUnits(const Model& model,
                                                 const std::vector<std::string>& classes);

// Changes job and plan to what DeepSpeed makes of the settings; unset members stand for its
// defaults. The sequence length stays, and so does recomputation, which is the model's.
void ApplyDeepSpeed(const DeepSpeedSettings& settings, PlanFile& file);

}  // namespace shardwright
