#pragma once

// Which software a published run used: what the rows of bench/published call "framework" becomes a
// kernel set and the rules of a dialect. A table row per stack, no code per stack.

#include <string_view>

#include "analysis/measured_run.h"
#include "models/kernel_set.h"
#include "schedule/plan.h"

namespace shardwright {

struct Stack {
  std::string_view framework = {};  // part of the column "framework"; empty: any
  std::string_view compiled = {};   // "y", "n" (anything but y) or empty: any
  std::string_view before = {};     // only runs dated before this; empty: any
  std::string_view gpu = {};        // part of the column "gpu_class"; empty: any
  std::string_view kernel_set = "torch-2024";
  Dialect dialect = Dialect::kFsdp2;  // of fully sharded runs
  std::string_view wrap = "block";
  OptimizerImpl optimizer = OptimizerImpl::kForeach;
  DType reduce = DType::kFp32;  // of gradients, where the row does not say
  BackwardPrefetch backward_prefetch = BackwardPrefetch::kPre;  // fsdp1
  SyncMode sync = SyncMode::kEvery;
  // What scaled_dot_product_attention calls where it has a choice.
  AttentionImpl sdpa = AttentionImpl::kFlash;
  bool recomputes = false;           // full checkpointing, where the row does not say
  bool expandable_segments = false;  // set for PyTorch's allocator by the launch script
  // DeepSpeed before 2022 (zero3): every gather waits for all work before it and computation for
  // every gather, one parameter after the other.
  bool waits_for_gathers = false;
  // DeepSpeed's sizes follow the hidden size: "auto" of Transformers, bigscience's script.
  bool sizes_by_hidden = false;
  // The model itself reads the embedding's table for the logits (Megatron's GPT2Model), which makes
  // it a parameter of the whole model: zero3 keeps it through each pass.
  bool holds_table = false;
  double dropout = 0;                // the default of its GPT models
  bool has_own_head = false;         // GPT models whose head is untied, where the row does not say
  bool checkpoints_on_host = false;  // the launch script's default, where blocks are recomputed
  // Gathers and reductions share one communicator, though the dialect gives them two: their memory
  // is that of one.
  bool one_communicator = false;
};

// The first row of the table that fits. Reads the columns framework, compiled, date and gpu_class
// and nothing else.
[[nodiscard]] const Stack& FindStack(const MeasuredRun& run);

}  // namespace shardwright
