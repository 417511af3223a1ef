#pragma once

// Facts about model and job that every dialect needs before the first op is written. They say which
// kernels a spec has, which tensors need gradients and how long these live. They also say which ops
// of checkpointed regions run again. analysis.cc has an example.

#include <cstdint>
#include <string>
#include <vector>

#include "models/kernel_set.h"
#include "models/model.h"
#include "schedule/lower.h"

namespace shardwright {

// One checkpointed region: a contiguous stretch of model ops.
struct Region {
  std::uint32_t first = 0;  // model op indices, both included
  std::uint32_t last = 0;
  std::size_t planned = kNotPlanned;  // the entry of Plan::recompute
  std::vector<std::uint32_t> rerun;   // ops that backward runs again, in forward order
  // The region around it that runs it a second time, and keeps nothing of it: as `rerun` it runs a
  // third time, for its own backward. Its ops say that they are the outer region's.
  std::uint32_t outer = 0xffffffffu;
  // Storages whose recomputed instance lives until the region's backward has ended, read or not.
  std::vector<std::uint32_t> held;
  // The same for instances from forward: what selective checkpointing keeps although nobody reads
  // it.
  std::vector<std::uint32_t> kept_unread;

  static constexpr std::size_t kNotPlanned = ~std::size_t{0};  // a compiler's own
};
inline constexpr std::uint32_t kNoRegion = 0xffffffffu;

struct ModelOpFacts {
  bool has_backward = false;      // some output and some input or parameter need a gradient
  bool weight_grad = false;       // some parameter is trainable
  std::uint32_t input_grads = 0;  // bit i: input i needs a gradient
  std::uint32_t region = kNoRegion;
  std::uint32_t inner = kNoRegion;  // the region with an outer one that it lies in
  bool reruns = false;              // in its region's rerun list
  bool saves_in_forward = false;    // what it saves is kept from forward (no region, or kept by it)
  // KernelSetOptions::fused_gelu, on three ops in a row. The linear layer before: its output is the
  // GELU's input, and it writes the GELU's output as well. The one behind: its backward reads the
  // GELU's input, too, and writes that one's gradient in place of its own input's.
  bool runs_next = false;
  bool runs_previous = false;
  // KernelSetOptions::fused_residual: a sum that the norm right behind it makes in its forward.
  bool left_to_next = false;
  // KernelSetOptions::loss_chunks: a linear layer whose backward runs its forward and the loss
  // right behind it, both ways. Of the loss itself nothing is left.
  bool runs_loss = false;
};

// Tensors that share storage (views, in-place results) share one entry.
struct StorageFacts {
  Bytes bytes;
  bool is_index = false;               // ids, labels
  std::uint32_t producer = kNoRegion;  // model op; none for inputs
  std::uint32_t forward_uses = 0;      // reads by forward ops
  std::uint32_t backward_uses = 0;  // later reads of the forward instance: backward ops that saved
                                    // it, recomputations that start from it, metrics
  std::uint32_t rerun_uses = 0;     // reads of the recomputed instance: reruns and backward ops
  // The same for an instance that an outer region's rerun makes of an inner one's storage: it is
  // gone when the inner region runs again.
  std::uint32_t passing_uses = 0;
  bool recomputed = false;  // backward uses a second, recomputed instance
};

struct ModelAnalysis {
  std::vector<OpKernels> kernels;         // per variant: a spec at the micro-batch, or at batch 1
  std::vector<std::uint32_t> variant;     // per model op: index into `kernels`
  std::vector<ModelOpFacts> ops;          // per model op
  std::vector<std::uint32_t> storage_of;  // per tensor
  std::vector<StorageFacts> storages;
  // Per parameter: autograd makes a gradient of it. It is trainable, or a view of a flat parameter
  // that others make trainable (FSDP1 with use_orig_params).
  std::vector<bool> param_grad;
  std::vector<bool> tensor_grad;  // per tensor: needs a gradient
  bool trains = false;
  // Per parameter: stored in 8 or 4 bits (Job::frozen_format), and made whole for the op that reads
  // it.
  std::vector<bool> quantized;
  std::vector<DType> masters;       // per parameter: of what learns and its gradient and states
  std::vector<bool> wide_tensors;   // autocast.h: in fp32
  std::vector<bool> wide_ops;       // and what computes in fp32
  std::vector<Bytes> tensor_bytes;  // per tensor: its size, and that of its gradient
  std::vector<Region> regions;      // in forward order, disjoint but for those with an outer one
  // Per model op with weight gradients: a storage that stands for those of all ops with which it
  // shares one, directly or by others. Their gradients lie in one buffer.
  std::vector<ParamId> grad_group;

  [[nodiscard]] const OpKernels& KernelsOf(std::uint32_t model_op) const {
    return kernels[variant[model_op]];
  }
  // The op whose inputs `model_op` reads in forward: itself, or the sum that it makes first.
  [[nodiscard]] std::uint32_t ReaderOf(std::uint32_t model_op) const {
    return model_op > 0 && ops[model_op - 1].left_to_next ? model_op - 1 : model_op;
  }
};

// Does the region's rerun only pass the op, whose own region runs it again later?
[[nodiscard]] inline bool IsPassed(const ModelAnalysis& a, std::uint32_t region, std::uint32_t op) {
  return a.ops[op].inner != kNoRegion && a.ops[op].inner != region;
}

// Calls f(storage, role, index) for each tensor that the op keeps for its backward. Role kInput or
// kOutput comes with the index among the op's inputs or outputs. The input of a GELU that the op
// runs has the next index, the labels of a loss that it runs have role kLabels. Frozen ops do not
// keep tensors that only weight gradients read.
template <class F>
void ForEachSaved(const ModelAnalysis& a, const Model& model, std::uint32_t model_op, F f) {
  const ModelOp& op = model.ops[model_op];
  const OpKernels& k = a.KernelsOf(model_op);
  const std::uint32_t saved =
      a.ops[model_op].weight_grad ? k.saves_input : k.saves_input & ~k.saves_input_for_weight;
  for (std::size_t i = 0; i < op.inputs.size(); ++i) {
    if (((saved >> i) & 1U) != 0) {
      f(a.storage_of[op.inputs[i].value], Role::kInput, static_cast<std::uint16_t>(i));
    }
  }
  if (a.ops[model_op].runs_previous) {
    f(a.storage_of[model.ops[model_op - 1].inputs.front().value], Role::kInput,
      static_cast<std::uint16_t>(op.inputs.size()));
  }
  if (a.ops[model_op].runs_loss) {
    f(a.storage_of[model.ops[model_op + 1].inputs.back().value], Role::kLabels, std::uint16_t{0});
  }
  for (std::size_t i = 0; i < op.outputs.size(); ++i) {
    if (((k.saves_output >> i) & 1U) != 0) {
      f(a.storage_of[op.outputs[i].value], Role::kOutput, static_cast<std::uint16_t>(i));
    }
  }
}

// Per tensor: does it require a gradient, whether or not a loss depends on it?
[[nodiscard]] std::vector<bool> RequiringGrad(const Model& model,
                                              const std::vector<bool>& param_grad);

// Requires a plan that ValidatePlan has accepted. Throws InputError for recompute regions that run
// no ops or overlap. O(ops).
[[nodiscard]] ModelAnalysis AnalyzeModel(const LowerInput& input, const std::string& where);

}  // namespace shardwright
