#pragma once

// FSDP as Accelerate runs it, alone and under the Hugging Face Trainer. Facts are those of
// accelerate 1.15 and transformers 5.23 (utils/dataclasses.py, utils/fsdp_utils.py,
// training_args.py; read 2026-11-22).

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/plan_file.h"

namespace shardwright {

// What their FullyShardedDataParallelPlugin is given. Defaults are the plugin's.
struct HfFsdp {
  std::int64_t version = 2;                // 1: FullyShardedDataParallel; 2: fully_shard
  std::vector<std::string> layer_classes;  // TRANSFORMER_BASED_WRAP; none: NO_WRAP
  bool has_layers_of_model = false;        // instead of names: the model's _no_split_modules
  std::int64_t min_num_params = 0;         // above 0: SIZE_BASED_WRAP instead
  bool reshard_after_forward = true;       // version 1: FULL_SHARD, or SHARD_GRAD_OP
  bool is_hybrid = false;                  // version 1: HYBRID_SHARD: shard inside a node
  bool no_shard = false;                   // version 1: NO_SHARD: replicas only
  bool cpu_offload = false;
  bool activation_checkpointing = false;          // each wrapped layer is recomputed
  bool activation_checkpointing_offload = false;  // version 2: and its input goes to the host
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kNone;  // version 1
  bool forward_prefetch = false;                                 // version 1
  bool use_orig_params = false;                                  // version 1
  bool limit_all_gathers = true;                                 // version 1
  std::string mixed_precision = "no";                            // no, bf16, fp16
  std::int64_t dp_replicate = 1;                                 // version 2: HSDP
  std::int64_t dp_shard = 0;                                     // 0: all ranks

  bool operator==(const HfFsdp&) const = default;
};

// Of PEFT's policy (fsdp_auto_wrap_policy): each module that learns and has none below it.
[[nodiscard]] std::vector<ModuleId> LearningLeaves(const Model& model);

// The nearest settings. Plans of dialect fsdp1 take version 1, all others version 2.
[[nodiscard]] HfFsdp HfFsdpOf(const PlanFile& file);

// Changes job and plan to what the frameworks make of these settings on the file's cluster; batch,
// accumulation and optimizer stay. Version 2 gives the embedding a unit, groups final norm and
// head (with tied weights all three), and keeps that group and the root gathered.
void ApplyHfFsdp(const HfFsdp& given, PlanFile& file);

// The same for DDP without keys of its own: PyTorch's buckets, no offload, fp32 masters under mixed
// precision.
void ApplyHfDdp(const std::string& mixed_precision, PlanFile& file);

// "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or "HYBRID_SHARD_ZERO2".
[[nodiscard]] std::string ShardingStrategyName(const HfFsdp& settings);
// "BACKWARD_PRE", "BACKWARD_POST" or "NO_PREFETCH".
[[nodiscard]] std::string BackwardPrefetchName(BackwardPrefetch prefetch);

}  // namespace shardwright
