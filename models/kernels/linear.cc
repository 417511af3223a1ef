// Ops that are one matrix product or one table lookup.

#include <algorithm>
#include <cstdint>

#include "models/kernels/fp8.h"
#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// Sorting ids and reducing their gradients, as PyTorch's dense embedding backward does it: the
// gradient of the whole table is zeroed, ids are sorted, runs of equal ids are cut into partial
// sums of at most kRowsPerPartial rows, and the partial sums are added up per id. Each of the
// `rows` gradient rows has `out` elements; the table has `table_rows` rows. Few rows are added
// straight into the table by one kernel.
// Source: ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu.
constexpr std::int64_t kRowsPerPartial = 10;
constexpr std::int64_t kFewRows = 3072;

void AppendTableGradient(const LowerContext& context, std::int64_t rows, std::int64_t table_rows,
                         std::int64_t out, OpKernels* op) {
  const std::int64_t table = Product({table_rows, out, context.s});
  const std::int64_t gradients = Product({rows, out, context.s});
  const std::int64_t ids = Product({rows, kIndexBytes});
  const std::int64_t touched = Product({std::min(rows, table_rows), out, context.s});
  const Kernel zeros = PassKernel(KernelClass::kElementwise, context.compute, 0, table);
  if (rows <= kFewRows) {
    op->backward_weight = {zeros, PassKernel(KernelClass::kGatherScatter, context.compute,
                                             gradients + ids + touched, touched)};
    return;
  }
  // The allocation is for the worst case of all ids being different; the traffic is one partial
  // sum per kRowsPerPartial rows at least, and the worst case is charged for it as well.
  const std::int64_t partials = rows / kRowsPerPartial + std::min(rows, table_rows);
  const std::int64_t partial_bytes = Product({partials, out, kFp32Bytes});
  op->backward_weight = {
      zeros,
      PassKernel(KernelClass::kGatherScatter, DType::kInt64, 2 * ids, 2 * ids),  // sort by id
      PassKernel(KernelClass::kGatherScatter, context.compute, gradients, partial_bytes),
      PassKernel(KernelClass::kGatherScatter, context.compute, partial_bytes, touched),
  };
  AddTensors({partial_bytes, ids, ids}, &op->backward_workspace, &op->backward_workspace_tensors);
}

// Products of fp8 copies. Scaling by the largest magnitude reads an operand once more than the cast
// itself. The copy of the input serves the weight gradient too.
void UseFp8(const LowerContext& context, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const auto cast = [&](std::int64_t elements) {
    return PassKernel(KernelClass::kCopy, context.compute, Product({elements, 2, context.s}),
                      elements);
  };
  const std::int64_t rows = Rows(context);
  const std::int64_t inputs = Product({rows, spec.in});
  const std::int64_t outputs = Product({rows, spec.out});
  const std::int64_t weights = Product({spec.in, spec.out});
  MultiplyCopies(context, inputs + weights, &op->forward[0]);
  MultiplyCopies(context, outputs + weights, &op->backward_data[0]);
  if (!spec.bias_only) {
    MultiplyCopies(context, outputs + inputs, &op->backward_weight[0]);
  }
  if (!GathersFp8(context.options.fp8)) {
    op->forward.insert(op->forward.begin(), cast(weights));
  }
  op->forward.insert(op->forward.begin(), cast(inputs));
  op->backward_data.insert(op->backward_data.begin(), cast(outputs));
}

}  // namespace

OpKernels LowerEmbedding(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t output = Product({rows, spec.out, context.s});
  OpKernels op;
  // Rows that are asked for again come from the cache.
  const std::int64_t touched = Product({std::min(rows, spec.vocab), spec.out, context.s});
  op.forward = {PassKernel(KernelClass::kGatherScatter, context.compute,
                           Product({rows, kIndexBytes}) + touched, output)};
  op.forward[0].reread = Bytes(output - touched);
  AppendTableGradient(context, rows, spec.vocab, spec.out, &op);
  op.saves_input = 1;
  op.saves_input_for_weight = 1;
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerPositionBias(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t pairs = Product({spec.seq_q, spec.seq_k});
  const std::int64_t ids = Product({pairs, kIndexBytes});
  const std::int64_t bias = Product({pairs, spec.heads, context.s});
  OpKernels op;
  // Distances to buckets: difference, sign, magnitude, comparison, logarithmic branch (float, log,
  // divide, scale, to integer, shift, clamp), selection, sum. Twelve passes over int64 in HF's T5.
  const std::int64_t passes = context.options.fused_elementwise ? 1 : 12;
  for (std::int64_t i = 0; i < passes; ++i) {
    op.forward.push_back(PassKernel(KernelClass::kElementwise, DType::kInt64, ids, ids));
  }
  op.forward.push_back(PassKernel(KernelClass::kGatherScatter, context.compute, ids + bias, bias));
  AppendTableGradient(context, pairs, spec.vocab, spec.heads, &op);
  op.extra_saved = Bytes(ids);  // the embedding lookup keeps its indices
  op.forward_workspace = Bytes(2 * ids);
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerLinear(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  OpKernels op;
  Kernel forward = GemmKernel(context, {.m = rows, .n = spec.out, .k = spec.in});
  const std::int64_t bias = spec.has_bias ? Product({spec.out, context.s}) : 0;
  forward.read += Bytes(bias);  // added in the epilogue
  op.forward = {forward};
  op.backward_data = {GemmKernel(context, {.m = rows, .n = spec.in, .k = spec.out})};
  Kernel weight = GemmKernel(context, {.m = spec.out, .n = spec.in, .k = rows});
  const bool sums_bias = spec.has_bias && (spec.bias_only || !context.options.fused_reductions);
  if (spec.has_bias && !sums_bias) {
    weight.written += Bytes(bias);
  }
  if (!spec.bias_only) {
    op.backward_weight = {weight};
  }
  if (sums_bias) {
    // Sum of the output gradient over rows.
    op.backward_weight.push_back(PassKernel(KernelClass::kElementwise, context.compute,
                                            Product({rows, spec.out, context.s}), bias));
  }
  op.saves_input = spec.bias_only ? 0 : 1;
  op.saves_input_for_weight = 1;
  op.output_aliases = {-1};
  op.compute_intensive = true;
  // Our own kernels say themselves what they do instead.
  if (MultipliesFp8(spec, context.compute, context.options) && !context.options.host_kernels &&
      !context.options.cuda_kernels) {
    UseFp8(context, &op);
  }
  ApplyAutocast(context, Product({spec.in, spec.out}) + (spec.has_bias ? spec.out : 0), &op);
  return op;
}

}  // namespace shardwright::internal
