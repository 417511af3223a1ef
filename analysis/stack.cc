#include "analysis/stack.h"

#include <array>

#include "core/error.h"

namespace shardwright {
namespace {

// Sources: composer's FSDPConfig (backward_prefetch BACKWARD_POST) and DecoupledAdamW (a loop over
// parameters); torchtitan's parallelize_llama.py (fsdp2, reduce in fp32) and its optimizer option
// "fused" (default since 2025), its loss compiled since pull request 1033 of April 2025, its
// run_train.sh, which sets expandable_segments; fairseq's example for FSDP and litgpt's
// finetune_full, which checkpoint activations; fairseq's softmax over fp32 scores; torchtune's
// recipes (fused AdamW); fms-fsdp's policies/mixed_precision.py (reduce in bf16) and fsdp1;
// accelerate's FSDP plugin (bf16 everywhere, no backward prefetch unless asked for), and PyTorch's
// FSDP before 2.0, whose default was the same; DeepSpeed's FusedAdam; foreach updates are PyTorch's
// default since 2.0 only; InternEvo reduces at the last micro-batch.
constexpr std::array<Stack, 40> kStacks = {{
    {.framework = "composer",
     .before = "2024",
     .kernel_set = "composer-2023",
     .dialect = Dialect::kFsdp1,
     .optimizer = OptimizerImpl::kForLoop,
     .backward_prefetch = BackwardPrefetch::kPost},
    {.framework = "composer",
     .kernel_set = "composer-2024",
     .dialect = Dialect::kFsdp1,
     .optimizer = OptimizerImpl::kForLoop,
     .backward_prefetch = BackwardPrefetch::kPost},
    // ROCm's allocator has no expandable segments; B200 needs software of spring 2025 or later.
    {.framework = "torchtitan",
     .compiled = "y",
     .gpu = "MI300",
     .kernel_set = "torch-compile",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused},
    {.framework = "torchtitan",
     .compiled = "y",
     .gpu = "B200",
     .kernel_set = "torch-compile",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused,
     .expandable_segments = true},
    {.framework = "torchtitan",
     .compiled = "y",
     .before = "2025",
     .kernel_set = "torch-compile-2024",
     .wrap = "torchtitan"},
    {.framework = "torchtitan",
     .compiled = "y",
     .before = "2025-04",
     .kernel_set = "torch-compile-2024",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused},
    {.framework = "torchtitan",
     .compiled = "y",
     .kernel_set = "torch-compile",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused,
     .expandable_segments = true},
    {.framework = "torchtitan", .before = "2025", .kernel_set = "torch-2024", .wrap = "torchtitan"},
    {.framework = "torchtitan",
     .before = "2025-04",
     .kernel_set = "torch-2024",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused},
    {.framework = "torchtitan",
     .kernel_set = "torch-2024",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused,
     .expandable_segments = true},
    {.framework = "torchtune",
     .compiled = "y",
     .kernel_set = "torch-compile",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused},
    {.framework = "torchtune",
     .kernel_set = "torch-2024",
     .wrap = "torchtitan",
     .optimizer = OptimizerImpl::kFused},
    {.framework = "fms-fsdp",
     .compiled = "y",
     .kernel_set = "torch-compile",
     .dialect = Dialect::kFsdp1,
     .reduce = DType::kBf16},
    {.framework = "fms-fsdp",
     .kernel_set = "torch-2024",
     .dialect = Dialect::kFsdp1,
     .reduce = DType::kBf16},
    {.framework = "foak-fast-kernels-liger",
     .kernel_set = "hf-liger",
     .dialect = Dialect::kFsdp1,
     .reduce = DType::kBf16,
     .backward_prefetch = BackwardPrefetch::kNone},
    {.framework = "foak-fast-kernels",
     .kernel_set = "hf-foak",
     .dialect = Dialect::kFsdp1,
     .reduce = DType::kBf16,
     .backward_prefetch = BackwardPrefetch::kNone},
    {.framework = "HF Trainer/SFTTrainer",
     .kernel_set = "hf-trainer",
     .dialect = Dialect::kFsdp1,
     .reduce = DType::kBf16,
     .backward_prefetch = BackwardPrefetch::kNone},
    {.framework = "InternEvo",
     .kernel_set = "internevo",
     .reduce = DType::kBf16,
     .sync = SyncMode::kLast},
    {.framework = "HF Trainer + DeepSpeed",
     .before = "2022",
     .kernel_set = "hf-2021",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16,
     .waits_for_gathers = true,
     .sizes_by_hidden = true,
     .dropout = 0.1},
    {.framework = "HF+DeepSpeed",
     .before = "2022",
     .kernel_set = "hf-2021",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16,
     .waits_for_gathers = true,
     .sizes_by_hidden = true,
     .dropout = 0.1},
    {.framework = "Megatron-LM-v1.1.5-ZeRO3",
     .before = "2022",
     .kernel_set = "megatron-2021",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16,
     .waits_for_gathers = true,
     .dropout = 0.1,
     .checkpoints_on_host = true},
    {.framework = "Megatron+DeepSpeed",
     .before = "2022",
     .kernel_set = "megatron-2021",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16,
     .waits_for_gathers = true,
     .dropout = 0.1,
     .checkpoints_on_host = true},
    {.framework = "DeepSpeed",
     .before = "2022",
     .kernel_set = "megatron-2021",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16,
     .waits_for_gathers = true,
     .dropout = 0.1},
    {.framework = "MaxText", .kernel_set = "jax-xla", .optimizer = OptimizerImpl::kFused},
    {.framework = "HF Trainer + DeepSpeed",
     .kernel_set = "hf-2023",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16},
    {.framework = "DeepSpeed",
     .kernel_set = "torch-2022",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kFp16},
    {.framework = "llm.c",
     .kernel_set = "shardwright-cuda",
     .optimizer = OptimizerImpl::kFused,
     .reduce = DType::kBf16,
     .sync = SyncMode::kLast},
    {.framework = "nanoGPT",
     .compiled = "y",
     .before = "2023-03",
     .kernel_set = "torch-2022",
     .sync = SyncMode::kLast},
    // Reductions have had a communicator of their own since 0.4.5 (January 2022, pull request 897).
    {.framework = "fairscale",
     .before = "2022",
     .kernel_set = "hf-2023",
     .dialect = Dialect::kFairscale,
     .optimizer = OptimizerImpl::kForLoop,
     .reduce = DType::kFp16,
     .recomputes = true,
     .one_communicator = true},
    {.framework = "fairscale",
     .kernel_set = "hf-2023",
     .dialect = Dialect::kFairscale,
     .optimizer = OptimizerImpl::kForLoop,
     .reduce = DType::kFp16,
     .recomputes = true},
    {.framework = "litgpt",
     .compiled = "y",
     .kernel_set = "torch-compile",
     .dialect = Dialect::kFsdp1,
     .recomputes = true},
    {.framework = "litgpt",
     .kernel_set = "torch-2024",
     .dialect = Dialect::kFsdp1,
     .recomputes = true},
    // TinyLlama's code, made from lit-gpt: fused norms, rotary embedding and loss of flash-attn,
    // and xformers' SwiGLU (its README).
    {.framework = "TinyLlama", .kernel_set = "hf-foak", .dialect = Dialect::kFsdp1},
    {.framework = "lit-gpt", .before = "2024", .kernel_set = "hf-foak", .dialect = Dialect::kFsdp1},
    // PyTorch's own benchmark of minGPT (mrshenli/ptd_benchmark): stem, norms, attention, the two
    // linears of the MLP and head are wrapped one by one, inside checkpointed blocks; the head is
    // not tied, dropout is 0.1. Its attention is one unit, here it is two.
    {.framework = "FSDP1",
     .before = "2023",
     .kernel_set = "torch-2022",
     .dialect = Dialect::kFsdp1,
     .wrap = "module",
     .optimizer = OptimizerImpl::kForLoop,
     .backward_prefetch = BackwardPrefetch::kNone,
     .dropout = 0.1,
     .has_own_head = true},
    {.framework = "Lightning", .kernel_set = "torch-2024", .dialect = Dialect::kFsdp1},
    {.framework = "accelerate", .kernel_set = "hf-eager", .dialect = Dialect::kFsdp1},
    {.framework = "FSDP1", .kernel_set = "torch-2024", .dialect = Dialect::kFsdp1},
    {.compiled = "y", .kernel_set = "torch-compile", .sync = SyncMode::kLast},
    {.kernel_set = "torch-2024", .sync = SyncMode::kLast},
}};

}  // namespace

const Stack& FindStack(const MeasuredRun& run) {
  for (const Stack& stack : kStacks) {
    const bool has_framework = run.framework.find(stack.framework) != std::string::npos;
    const bool has_compiled =
        stack.compiled.empty() || (stack.compiled == "y") == run.compiled.starts_with("y");
    // Dates are "2024-09", "2023-05..07" or "2024": text order is time order for their beginnings.
    const bool has_gpu = run.gpu_class.find(stack.gpu) != std::string::npos;
    const bool has_date = stack.before.empty() || run.date < stack.before;
    if (has_framework && has_compiled && has_gpu && has_date) {
      return stack;
    }
  }
  SW_CHECK(false, "the last row fits everything");
  return kStacks.back();
}

}  // namespace shardwright
