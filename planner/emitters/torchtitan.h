#pragma once

// torchtitan's TOML (versions up to 0.2.2; later ones are configured in Python with the same
// names).

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/emitters/settings.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct TorchtitanSettings {
  std::optional<std::string> model_name;    // llama3, qwen3, deepseek_v3
  std::optional<std::string> model_flavor;  // 8B
  std::optional<std::string> optimizer;     // Adam, AdamW
  std::optional<double> learning_rate;
  std::optional<double> weight_decay;             // torchtitan: 0.1
  std::optional<std::string> implementation;      // for-loop, foreach, fused (its default)
  std::optional<std::int64_t> local_batch_size;   // samples per rank and pass; 8
  std::optional<std::int64_t> global_batch_size;  // of all ranks and one step; -1: no accumulation
  std::optional<std::int64_t> seq_len;            // 2048
  std::optional<double> max_norm;                 // 1.0
  std::optional<std::string> dtype;               // of the masters; float32
  std::optional<std::string> mixed_precision_param;   // bfloat16
  std::optional<std::string> mixed_precision_reduce;  // float32
  std::optional<bool> enable_cpu_offload;
  std::optional<std::int64_t> data_parallel_replicate_degree;     // 1
  std::optional<std::int64_t> data_parallel_shard_degree;         // -1: the rest
  std::optional<std::int64_t> expert_parallel_degree;             // 1
  std::optional<std::int64_t> tensor_parallel_degree;             // 1
  std::optional<std::int64_t> context_parallel_degree;            // 1
  std::optional<std::string> context_parallel_rotate_method;      // 0.2's ring: allgather, alltoall
  std::optional<std::int64_t> pipeline_parallel_degree;           // 1
  std::optional<std::string> pipeline_parallel_schedule;          // 1F1B
  std::optional<std::int64_t> pipeline_parallel_microbatch_size;  // samples; 1
  std::optional<std::int64_t> pipeline_parallel_layers_per_stage;  // with embedding and head
  std::optional<bool> disable_loss_parallel;
  std::optional<std::string> fsdp_reshard_after_forward;  // default, always, never
  std::optional<std::string> activation_checkpoint_mode;  // none, full, selective
  std::optional<std::string> selective_ac_option;         // op, or every N-th layer
  std::optional<bool> compile;
  std::optional<std::vector<std::string>> components;         // compiled: model, loss (both)
  std::optional<std::vector<std::string>> converters;         // quantize.linear.float8
  std::optional<std::string> float8_recipe;                   // tensorwise (its default), rowwise
  std::optional<std::vector<std::string>> float8_leaves_out;  // parts of names
  std::optional<bool> float8_gathers;
};

[[nodiscard]] std::span<const SettingRow<TorchtitanSettings>> TorchtitanRows();

[[nodiscard]] TorchtitanSettings ToTorchtitan(const PlanFile& file);

// Changes job and plan to what torchtitan makes of the settings; unset members stand for its
// defaults. Throws InputError for a value that it refuses; `where` names the file.
void ApplyTorchtitan(const TorchtitanSettings& settings, const std::string& where, PlanFile& file);

}  // namespace shardwright
