// Mixture of experts: the router, and all experts with dispatch and combination.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// What differs between the two ways to run the experts.
struct ExpertRows {
  std::int64_t total = 0;       // rows over all experts
  std::int64_t per_expert = 0;  // rows of one expert, when the router is balanced
};

// One product per expert with its own (k, n) weight.
Kernel ExpertGemm(const LowerContext& context, const ExpertRows& rows, std::int64_t n,
                  std::int64_t k) {
  Kernel kernel;
  kernel.kind = KernelClass::kGroupedGemm;
  kernel.dtype = context.compute;
  kernel.batch = context.spec.experts;
  kernel.m = rows.per_expert;
  kernel.n = n;
  kernel.k = k;
  kernel.flops = Flops(2.0 * static_cast<double>(rows.total) * static_cast<double>(n) *
                       static_cast<double>(k));
  kernel.read =
      Bytes(Product({rows.total, k, context.s}) + Product({context.spec.experts, k, n, context.s}));
  kernel.written = Bytes(Product({rows.total, n, context.s}));
  return kernel;
}

// The gradient of that weight: (n, rows) x (rows, k) per expert.
Kernel ExpertWeightGemm(const LowerContext& context, const ExpertRows& rows, std::int64_t n,
                        std::int64_t k) {
  Kernel kernel = ExpertGemm(context, rows, n, k);
  kernel.m = n;
  kernel.n = k;
  kernel.k = rows.per_expert;
  kernel.read = Bytes(Product({rows.total, n, context.s}) + Product({rows.total, k, context.s}));
  kernel.written = Bytes(Product({context.spec.experts, n, k, context.s}));
  return kernel;
}

void Append(std::vector<Kernel> more, std::vector<Kernel>* kernels) {
  kernels->insert(kernels->end(), more.begin(), more.end());
}

// The expert MLP itself on `rows`; returns the bytes it keeps beside its input.
std::int64_t AppendExpertMlp(const LowerContext& context, const ExpertRows& rows, OpKernels* op) {
  const OpSpec& spec = context.spec;
  // The activation between the projections is lowered as the op it would be on its own.
  OpSpec middle;
  middle.kind = spec.gated ? OpKind::kGatedActivation : OpKind::kActivation;
  middle.rows = rows.total;
  middle.in = spec.out;
  middle.activation = spec.activation;
  const LowerContext inner{.spec = middle,
                           .batch = 1,
                           .compute = context.compute,
                           .options = context.options,
                           .s = context.s};
  const OpKernels act = spec.gated ? LowerGatedActivation(inner) : LowerActivation(inner);

  const Kernel up = ExpertGemm(context, rows, spec.out, spec.in);
  const Kernel down = ExpertGemm(context, rows, spec.in, spec.out);
  op->forward.push_back(up);
  if (spec.gated) {
    op->forward.push_back(up);
  }
  Append(act.forward, &op->forward);
  op->forward.push_back(down);

  // Input gradients are products with the transposed weights.
  op->backward_data.push_back(up);  // of the activation: (rows, in) x (in, out)
  Append(act.backward_data, &op->backward_data);
  op->backward_data.push_back(down);
  if (spec.gated) {
    op->backward_data.push_back(down);
    AppendElementwise(context, Product({rows.total, spec.in}), 2, 1, &op->backward_data);
  }
  op->backward_weight = {ExpertWeightGemm(context, rows, spec.in, spec.out)};
  for (int i = 0; i < (spec.gated ? 2 : 1); ++i) {
    op->backward_weight.push_back(ExpertWeightGemm(context, rows, spec.out, spec.in));
  }
  const std::int64_t hidden = Product({rows.total, spec.out, context.s});
  // Kept: the activation's inputs if it asks for them, its own extras, and its output, the input
  // of the down projection.
  const std::int64_t inputs = (act.saves_input & 1U) + ((act.saves_input >> 1U) & 1U);
  return inputs * hidden + act.extra_saved.value + hidden;
}

}  // namespace

OpKernels LowerRouter(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t logits = Product({rows, spec.experts, context.s});
  const std::int64_t probabilities = Product({rows, spec.experts, kFp32Bytes});
  const std::int64_t weights = Product({rows, spec.experts_per_token, kFp32Bytes});
  const std::int64_t indices = Product({rows, spec.experts_per_token, kIndexBytes});
  const std::int64_t row = Product({rows, kFp32Bytes});
  const DType fp32 = DType::kFp32;
  OpKernels op;
  op.forward = {
      GemmKernel(context, {.m = rows, .n = spec.experts, .k = spec.in}),
      PassKernel(KernelClass::kSoftmax, fp32, logits, probabilities),
      PassKernel(KernelClass::kGatherScatter, fp32, probabilities, weights + indices),  // top-k
      PassKernel(KernelClass::kElementwise, fp32, weights, row),            // sum of the weights
      PassKernel(KernelClass::kElementwise, fp32, weights + row, weights),  // normalise
  };
  op.backward_data = {
      PassKernel(KernelClass::kElementwise, fp32, 2 * weights + row, weights),
      PassKernel(KernelClass::kElementwise, fp32, 0, probabilities),  // zeros
      PassKernel(KernelClass::kGatherScatter, fp32, weights + indices, weights),
      PassKernel(KernelClass::kSoftmax, fp32, 2 * probabilities, logits),
      GemmKernel(context, {.m = rows, .n = spec.in, .k = spec.experts}),
  };
  op.backward_weight = {GemmKernel(context, {.m = spec.experts, .n = spec.in, .k = rows})};
  op.saves_input = 1;
  op.saves_input_for_weight = 1;
  // Softmax keeps its result, top-k its indices, the division both operands.
  op.extra_saved = Bytes(probabilities + indices + weights + row);
  op.backward_workspace = Bytes(probabilities + logits);
  op.output_aliases = {-1};
  op.compute_intensive = true;
  ApplyAutocast(context, Product({spec.in, spec.experts}), &op);
  return op;
}

OpKernels LowerExperts(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const DType t = context.compute;
  const std::int64_t tokens = Rows(context);
  const bool dense = context.options.moe_dispatch == MoeDispatch::kDense;
  ExpertRows rows;
  rows.total = Product({tokens, dense ? spec.experts : spec.experts_per_token});
  rows.per_expert = CeilDiv(rows.total, spec.experts);
  const std::int64_t token_bytes = Product({tokens, spec.in, context.s});
  const std::int64_t routed_bytes = Product({rows.total, spec.in, context.s});
  const std::int64_t indices = dense ? 0 : Product({rows.total, kIndexBytes});
  const std::int64_t weights = Product({rows.total, context.s});

  OpKernels op;
  if (!dense) {
    op.forward = {
        // Order of the routed rows by expert, then their copies in that order.
        PassKernel(KernelClass::kGatherScatter, DType::kInt64, 2 * indices, 2 * indices),
        PassKernel(KernelClass::kGatherScatter, t, token_bytes + indices, routed_bytes),
    };
  }
  // Backward starts with the combination: each routed row gets its token's gradient, then the
  // product with the routing weight splits it.
  if (!dense) {
    op.backward_data.push_back(
        PassKernel(KernelClass::kGatherScatter, t, token_bytes + indices, routed_bytes));
  }
  const std::int64_t incoming = dense ? token_bytes : routed_bytes;
  op.backward_data.push_back(
      PassKernel(KernelClass::kElementwise, t, incoming + weights, routed_bytes));
  op.backward_data.push_back(
      PassKernel(KernelClass::kElementwise, t, incoming + routed_bytes, weights));
  const std::int64_t mlp_saved = AppendExpertMlp(context, rows, &op);
  // Weighted, then summed per token.
  op.forward.push_back(
      PassKernel(KernelClass::kElementwise, t, routed_bytes + weights, routed_bytes));
  op.forward.push_back(
      PassKernel(KernelClass::kGatherScatter, t, routed_bytes + indices, token_bytes));
  op.backward_data.push_back(PassKernel(KernelClass::kGatherScatter, t, routed_bytes + indices,
                                        token_bytes));  // back to tokens

  // Kept: the routed copies (dense: the tokens themselves), what the MLP keeps, both factors of the
  // weighted sum, and of the dispatch three vectors of row indices (the order, its tokens, its
  // inverse) and the int32 offsets of the experts.
  op.saves_input = dense ? 1 : 0;
  op.saves_input_for_weight = op.saves_input;
  const std::int64_t dispatch = dense ? 0 : routed_bytes + 3 * indices + Product({4, spec.experts});
  op.extra_saved = Bytes(dispatch + mlp_saved + routed_bytes + weights);
  op.forward_workspace = Bytes(routed_bytes);  // the weighted rows
  const std::int64_t hidden = Product({rows.total, spec.out, context.s});
  op.backward_workspace = Bytes(routed_bytes + (spec.gated ? 3 : 2) * hidden);
  op.output_aliases = {-1};
  op.compute_intensive = true;
  ApplyAutocast(context, Product({spec.experts, spec.in, spec.out, spec.gated ? 3 : 2}), &op);
  return op;
}

}  // namespace shardwright::internal
