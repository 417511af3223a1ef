#pragma once

// Accelerate's YAML (`accelerate launch --config_file`), as version 1.15 reads it.

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "planner/emitters/hf_fsdp.h"
#include "planner/emitters/settings.h"

namespace shardwright {

struct AccelerateSettings {
  std::optional<std::string> compute_environment;
  std::optional<std::string> distributed_type;  // FSDP, MULTI_GPU, DEEPSPEED
  std::optional<std::string> mixed_precision;   // no, bf16, fp16
  std::optional<std::int64_t> num_machines;
  std::optional<std::int64_t> num_processes;  // of all machines
  std::optional<std::int64_t> machine_rank;
  std::optional<std::string> rdzv_backend;
  std::optional<std::string> main_process_ip;
  std::optional<std::int64_t> main_process_port;
  std::optional<std::int64_t> fsdp_version;
  std::optional<std::string> fsdp_auto_wrap_policy;
  std::optional<std::string> fsdp_transformer_layer_cls_to_wrap;  // joined by commas
  std::optional<std::int64_t> fsdp_min_num_params;
  std::optional<bool> fsdp_reshard_after_forward;     // version 2
  std::optional<std::string> fsdp_sharding_strategy;  // version 1
  std::optional<std::string> fsdp_backward_prefetch;  // version 1
  std::optional<bool> fsdp_forward_prefetch;          // version 1
  std::optional<bool> fsdp_use_orig_params;           // version 1
  std::optional<bool> fsdp_sync_module_states;        // version 1
  std::optional<bool> fsdp_cpu_ram_efficient_loading;
  std::optional<bool> fsdp_offload_params;
  std::optional<std::string> fsdp_state_dict_type;
  std::optional<bool> fsdp_activation_checkpointing;
  std::optional<bool> fsdp_activation_checkpointing_offload;  // version 2
  std::optional<std::int64_t> dp_replicate_size;              // version 2
  std::optional<std::int64_t> dp_shard_size;                  // version 2
  std::optional<std::int64_t> context_size;                   // version 2
  std::optional<std::string> deepspeed_config_file;           // DEEPSPEED
  std::optional<bool> zero3_init_flag;                        // DEEPSPEED
};

// What `accelerate launch` passes on as fsdp_min_num_params where the file has no such key.
inline constexpr std::int64_t kLauncherMinNumParams = 100'000'000;

[[nodiscard]] std::span<const SettingRow<AccelerateSettings>> AccelerateRows();

// distributed_type FSDP only.
[[nodiscard]] AccelerateSettings ToAccelerate(const HfFsdp& fsdp, const Cluster& cluster);
// Unset members stand for the defaults of `accelerate launch`. Throws InputError for a value that
// Accelerate refuses; `where` names the file.
[[nodiscard]] HfFsdp FromAccelerate(const AccelerateSettings& settings, const std::string& where);

}  // namespace shardwright
