// Losses and the log-softmax before them.

#include <cstdint>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// Log-softmax of rows of `features` elements as PyTorch's kernels run it: rows of more than the 48
// KiB of shared memory are read for their largest element, for the sum and for the result
// (backward: the gradient for its sum, then with the result). ATen/native/cuda/SoftMax.cu.
constexpr std::int64_t kSoftmaxRowInBlock = 48 * 1024;
Kernel LogSoftmaxKernel(DType dtype, std::int64_t features, std::int64_t bytes, bool is_forward) {
  Kernel kernel = PassKernel(KernelClass::kSoftmax, dtype, is_forward ? bytes : 2 * bytes, bytes);
  const std::int64_t row = Product({features, SizeOf(dtype)});
  kernel.row = Bytes(row);
  if (row > kSoftmaxRowInBlock) {
    kernel.reread = Bytes(is_forward ? 2 * bytes : bytes);
  }
  return kernel;
}

// The mean of the labels' log-probabilities: one block of 32 threads, of which each loads a label
// and then its element (ATen/native/cuda/Loss.cu, NLL_LOSS_THREADS). A compiler's kernel has many
// blocks.
Kernel NllForwardKernel(const LowerContext& context, DType dtype, std::int64_t rows) {
  constexpr std::int64_t kThreads = 32;
  Kernel kernel = PassKernel(KernelClass::kGatherScatter, dtype,
                             Product({rows, SizeOf(dtype) + kIndexBytes}), kFp32Bytes);
  kernel.waits = context.options.fused_elementwise ? 0 : 2 * CeilDiv(rows, kThreads);
  return kernel;
}

// Without a cast, too, the loss may work on a copy without the last token. Log-softmax before
// PyTorch 1.11 keeps what it reads: the last copy of the logits, or the logits themselves.
void AddLossInput(const LowerContext& context, bool casts, std::int64_t f, OpKernels* op) {
  const bool keeps = context.options.softmax_keeps_input;
  const bool copies = casts || context.options.shifted_logits;
  if (!casts && copies) {
    op->forward.insert(op->forward.begin(), PassKernel(KernelClass::kCopy, context.compute, f, f));
    op->backward_data.push_back(PassKernel(KernelClass::kElementwise, context.compute, f, 2 * f));
    op->forward_workspace += Bytes(f);
  }
  if (keeps && !copies) {
    op->saves_input = 1;
  } else if (keeps) {
    op->forward_workspace -= Bytes(f);
    op->forward_workspace_tensors.clear();
    AddTensors({f}, &op->extra_saved, &op->extra_saved_tensors);
  }
}

// Cross-entropy as PyTorch runs it: an optional fp32 copy of the logits, log-softmax over it, then
// the negative log-likelihood of the labels. Autograd keeps the log-softmax result.
OpKernels EagerCrossEntropy(const LowerContext& context) {
  const std::int64_t rows = Rows(context);
  const std::int64_t elements = Elements(context);
  const std::int64_t logits = Product({elements, context.s});
  const bool casts = context.options.fp32_logits && context.compute != DType::kFp32;
  const DType t = casts ? DType::kFp32 : context.compute;
  const std::int64_t f = Product({elements, SizeOf(t)});
  const std::int64_t labels = Product({rows, kIndexBytes});
  OpKernels op;
  if (casts) {
    op.forward.push_back(PassKernel(KernelClass::kCopy, t, logits, f));
  }
  const std::int64_t features = elements / rows;
  op.forward.push_back(LogSoftmaxKernel(t, features, f, true));
  op.forward.push_back(NllForwardKernel(context, t, rows));
  op.backward_data = {
      PassKernel(KernelClass::kElementwise, t, 0, f),  // zeros
      PassKernel(KernelClass::kGatherScatter, t, labels, Product({rows, SizeOf(t)})),
      LogSoftmaxKernel(t, features, f, false),
  };
  if (casts) {
    op.backward_data.push_back(PassKernel(KernelClass::kCopy, context.compute, f, logits));
  }
  op.extra_saved = Bytes(f);
  op.forward_workspace = Bytes(casts ? f : 0);
  if (casts && context.options.shifted_logits) {
    // The fp32 copy and the shifted copy; by then the name that held the logits holds the first.
    op.forward.insert(op.forward.begin() + 1, PassKernel(KernelClass::kCopy, t, f, f));
    op.backward_data.push_back(PassKernel(KernelClass::kElementwise, t, f, 2 * f));
    op.forward_workspace += Bytes(f - logits);
    op.forward_workspace_tensors = {Bytes(f), Bytes(f)};
  }
  AddLossInput(context, casts, f, &op);
  // Both gradients of the log-softmax; without a cast the second is the logits' gradient itself.
  op.backward_workspace = Bytes(casts ? 2 * f - logits : f);
  if (casts) {
    // The gradient of the logits comes when the first of these has gone, but not where it lay.
    op.backward_workspace_tensors = {Bytes(f), Bytes(f)};
  }
  return op;
}

// The same where each rank has a part of the vocabulary (torch's loss_parallel): the ranks reduce
// the largest logit of a token, the sum of its exponentials, and its label's log-probability.
// Source: torch/distributed/tensor/parallel/loss.py, torch 2.13.
OpKernels ParallelCrossEntropy(const LowerContext& context) {
  const std::int64_t logits = Product({Elements(context), context.s});
  const std::int64_t f = Product({Elements(context), kFp32Bytes});
  const std::int64_t numbers = Product({Rows(context), kFp32Bytes});
  const bool casts = context.compute != DType::kFp32;
  const bool fuses = context.options.fused_elementwise;
  const auto pass = [](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kElementwise, DType::kFp32, read, written);
  };
  const auto reduce = [](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kSoftmax, DType::kFp32, read, written);
  };
  const Kernel label = PassKernel(KernelClass::kGatherScatter, DType::kFp32,
                                  Product({Rows(context), kFp32Bytes + kIndexBytes}), numbers);
  OpKernels op;
  const Bytes sum(numbers);
  if (fuses) {
    op.tensor_sums = {{{reduce(logits, numbers)}, sum},
                      {{reduce(logits + numbers, numbers)}, sum},
                      {{pass(logits + 2 * numbers, f), label}, sum}};
    op.backward_data = {pass(f, logits)};
  } else {
    op.tensor_sums = {{{reduce(f, numbers)}, sum},
                      {{pass(f + numbers, f), pass(f, f), reduce(f, numbers)}, sum},
                      {{pass(f + numbers, f), label}, sum}};
    op.backward_data = {pass(0, f), label, pass(f, f), pass(2 * f, f), pass(f + numbers, f)};
    op.forward_workspace = Bytes(f);
    op.forward_workspace_tensors = {Bytes(f)};
    op.backward_workspace = Bytes(3 * f - logits);
    if (casts) {
      const Kernel widen = PassKernel(KernelClass::kCopy, DType::kFp32, logits, f);
      op.tensor_sums[0].before.insert(op.tensor_sums[0].before.begin(), widen);
      op.backward_data.push_back(PassKernel(KernelClass::kCopy, context.compute, f, logits));
      AddTensors({f}, &op.forward_workspace, &op.forward_workspace_tensors);
    }
  }
  op.forward = {pass(numbers, kFp32Bytes)};
  op.extra_saved = Bytes(f);
  return op;
}

// The same on a shifted fp32 copy of the logits, which the backward kernel overwrites with its
// gradient (Unsloth's kernel, used by fms-acceleration).
OpKernels ShiftedFusedCrossEntropy(const LowerContext& context) {
  const std::int64_t rows = Rows(context);
  const std::int64_t logits = Product({Elements(context), context.s});
  const std::int64_t f = Product({Elements(context), kFp32Bytes});
  const std::int64_t labels = Product({rows, kIndexBytes});
  const std::int64_t stats = Product({rows, 2, kFp32Bytes});
  const DType fp32 = DType::kFp32;
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kCopy, fp32, logits, f),
                PassKernel(KernelClass::kCopy, fp32, f, f),
                PassKernel(KernelClass::kSoftmax, fp32, f + labels, stats)};
  op.backward_data = {PassKernel(KernelClass::kSoftmax, fp32, f + labels + stats, f),
                      PassKernel(KernelClass::kElementwise, fp32, f, 2 * f),  // into zeros
                      PassKernel(KernelClass::kCopy, context.compute, f, logits)};
  AddTensors({f, stats}, &op.extra_saved, &op.extra_saved_tensors);
  // Both ways two fp32 tensors at the peak, when the logits (their gradient) are gone (not there
  // yet).
  op.forward_workspace = Bytes(f - logits);
  op.backward_workspace = Bytes(f - logits);
  return op;
}

// One kernel with an online softmax that reads the logits once and keeps them and two numbers per
// row, and one that turns them into their gradient.
OpKernels FusedCrossEntropy(const LowerContext& context) {
  if (context.options.shifted_logits && context.compute != DType::kFp32) {
    return ShiftedFusedCrossEntropy(context);
  }
  const std::int64_t rows = Rows(context);
  const std::int64_t logits = Product({Elements(context), context.s});
  const std::int64_t labels = Product({rows, kIndexBytes});
  const std::int64_t stats = Product({rows, 2, kFp32Bytes});
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kSoftmax, context.compute, logits + labels, stats)};
  op.backward_data = {
      PassKernel(KernelClass::kSoftmax, context.compute, logits + labels + stats, logits)};
  op.saves_input = 1;
  op.extra_saved = Bytes(stats);
  return op;
}

// The cross-entropies that metrics compute once the micro-batch is done: fp32 copy, log-softmax,
// loss of the labels, one metric after the other. Of llm-foundry alone, whose steps say that they
// do not read long rows again (with that its models left out are 3.2 % off and not 2.5).
void AppendMetrics(const LowerContext& context, OpKernels* op) {
  const std::int64_t rows = Rows(context);
  const std::int64_t logits = Product({Elements(context), context.s});
  const std::int64_t f = Product({Elements(context), kFp32Bytes});
  const std::int64_t labels = Product({rows, kIndexBytes});
  const bool casts = context.compute != DType::kFp32;
  for (std::int64_t i = 0; i < context.options.loss_metrics; ++i) {
    if (casts) {
      op->metrics.push_back(PassKernel(KernelClass::kCopy, DType::kFp32, logits, f));
    }
    op->metrics.push_back(PassKernel(KernelClass::kSoftmax, DType::kFp32, f, f));
    op->metrics.push_back(PassKernel(KernelClass::kGatherScatter, DType::kFp32,
                                     Product({rows, kFp32Bytes}) + labels, kFp32Bytes));
  }
  if (context.options.loss_metrics > 0) {
    op->metrics_workspace_tensors.assign(casts ? 2 : 1, Bytes(f));
  }
}

}  // namespace

OpKernels LowerLogSoftmax(const LowerContext& context) {
  const std::int64_t e = Product({Elements(context), context.s});
  const std::int64_t features = Elements(context) / Rows(context);
  OpKernels op;
  op.forward = {LogSoftmaxKernel(context.compute, features, e, true)};
  op.backward_data = {LogSoftmaxKernel(context.compute, features, e, false)};
  op.saves_output = 1;
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerNllLoss(const LowerContext& context) {
  const std::int64_t rows = Rows(context);
  const std::int64_t e = Product({Elements(context), context.s});
  const std::int64_t picked = Product({rows, context.s});
  const std::int64_t labels = Product({rows, kIndexBytes});
  OpKernels op;
  op.forward = {
      PassKernel(KernelClass::kGatherScatter, context.compute, picked + labels, kFp32Bytes)};
  op.backward_data = {PassKernel(KernelClass::kElementwise, context.compute, 0, e),
                      PassKernel(KernelClass::kGatherScatter, context.compute, labels, picked)};
  op.saves_input = 0b11;  // log-probabilities and labels
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerCrossEntropy(const LowerContext& context) {
  OpKernels op = context.spec.tensor_ranks > 0 ? ParallelCrossEntropy(context)
                 : context.options.fused_loss  ? FusedCrossEntropy(context)
                                               : EagerCrossEntropy(context);
  AppendMetrics(context, &op);
  op.saves_input |= 0b10;  // labels
  if (context.options.keeps_logits) {
    op.saves_input |= 0b01;
  }
  op.output_aliases = {-1};
  return op;
}

}  // namespace shardwright::internal
