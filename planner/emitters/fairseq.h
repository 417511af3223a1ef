#pragma once

// fairseq's Hydra configuration (fairseq-hydra-train --config-dir DIR --config-name NAME).

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/emitters/settings.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct FairseqSettings {
  std::optional<bool> fp16;
  std::optional<bool> memory_efficient_fp16;  // no fp32 masters
  std::optional<std::string> ddp_backend;     // fully_sharded; pytorch_ddp: DDP
  std::optional<std::int64_t> distributed_world_size;
  std::optional<bool> no_reshard_after_forward;
  std::optional<bool> fp32_reduce_scatter;
  std::optional<bool> cpu_offload;
  std::optional<std::int64_t> bucket_cap_mb;  // 25
  std::optional<std::string> task;
  std::optional<std::int64_t> tokens_per_sample;
  std::optional<std::int64_t> batch_size;
  std::optional<std::string> criterion;
  std::optional<std::string> optimizer;  // adam, cpu_adam, sgd, adadelta
  std::optional<double> weight_decay;
  std::optional<double> momentum;                        // of sgd
  std::optional<double> clip_norm;                       // 0: none
  std::optional<std::vector<std::int64_t>> update_freq;  // accumulation by epoch; one entry
  std::optional<std::string> model;
  std::optional<bool> checkpoint_activations;
  std::optional<bool> offload_activations;
  std::optional<std::int64_t> min_params_to_wrap;  // 1e8
};

[[nodiscard]] std::span<const SettingRow<FairseqSettings>> FairseqRows();

[[nodiscard]] FairseqSettings ToFairseq(const PlanFile& file);
// Changes job and plan to what fairseq makes of the settings; unset members stand for its defaults.
void ApplyFairseq(const FairseqSettings& settings, PlanFile& file);

}  // namespace shardwright
