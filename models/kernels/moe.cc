// Mixture of experts: the router, and all experts with dispatch and combination.

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

struct ExpertMlp {
  std::int64_t saved = 0;      // bytes kept beside its input
  std::int64_t gradients = 0;  // bytes of the gradients of its activation's inputs
};

// The expert MLP itself on `rows`.
ExpertMlp AppendExpertMlp(const LowerContext& context, const ExpertRows& rows, OpKernels* op) {
  const OpSpec& spec = context.spec;
  // The activation between the projections is lowered as the op it would be on its own.
  OpSpec middle;
  middle.kind = spec.gated ? OpKind::kGatedActivation : OpKind::kActivation;
  middle.rows = rows.total;
  middle.in = spec.out;
  middle.activation = spec.activation;
  middle.gelu_code = spec.gelu_code;
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
  return {.saved = inputs * hidden + act.extra_saved.value + hidden,
          .gradients = (spec.gated ? 2 : 1) * hidden};
}

}  // namespace

OpKernels LowerRouter(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t logits = Product({rows, spec.experts, context.s});
  const std::int64_t scores = Product({rows, spec.experts, kFp32Bytes});
  const std::int64_t chosen = Product({rows, spec.experts_per_token, kFp32Bytes});
  const std::int64_t cast = Product({rows, spec.experts_per_token, context.s});
  const std::int64_t indices = Product({rows, spec.experts_per_token, kIndexBytes});
  const std::int64_t row = Product({rows, kFp32Bytes});
  const bool casts = context.compute != DType::kFp32;
  const DType fp32 = DType::kFp32;
  const auto pass = [](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kElementwise, DType::kFp32, read, written);
  };
  OpKernels op;
  op.forward = {GemmKernel(context, {.m = rows, .n = spec.experts, .k = spec.in})};
  if (casts) {
    op.forward.push_back(PassKernel(KernelClass::kCopy, fp32, logits, scores));
  }
  Append({PassKernel(KernelClass::kSoftmax, fp32, scores, scores),
          PassKernel(KernelClass::kGatherScatter, fp32, scores, chosen + indices),  // top-k
          pass(chosen, row), pass(chosen + row, chosen)},                           // normalise
         &op.forward);
  if (casts) {
    op.forward.push_back(PassKernel(KernelClass::kCopy, context.compute, chosen, cast));
    op.backward_data.push_back(PassKernel(KernelClass::kCopy, fp32, cast, chosen));
  }
  // Quotient: g / sum; then g * -(w / sum / sum), its sum, and the sum of both paths. Then into
  // zeros.
  Append({pass(chosen + row, chosen), pass(chosen + row, chosen), pass(chosen + row, chosen),
          pass(chosen, chosen), pass(2 * chosen, chosen), pass(chosen, row),
          pass(chosen + row, chosen), pass(0, scores),
          PassKernel(KernelClass::kGatherScatter, fp32, chosen + indices, chosen),
          PassKernel(KernelClass::kSoftmax, fp32, 2 * scores, scores)},
         &op.backward_data);
  if (casts) {
    op.backward_data.push_back(PassKernel(KernelClass::kCopy, context.compute, scores, logits));
  }
  op.backward_data.push_back(GemmKernel(context, {.m = rows, .n = spec.in, .k = spec.experts}));
  op.backward_weight = {GemmKernel(context, {.m = spec.experts, .n = spec.in, .k = rows})};
  op.saves_input = 1;
  op.saves_input_for_weight = 1;
  // Softmax keeps its result, top-k its indices, the quotient both operands.
  op.extra_saved = Bytes(scores + indices + chosen + row);
  op.forward_workspace = Bytes(logits + (casts ? scores : 0));
  op.backward_workspace = Bytes(2 * scores);
  op.output_aliases = {-1};
  op.compute_intensive = true;
  ApplyAutocast(context, Product({spec.in, spec.experts}), &op);
  return op;
}

namespace {

// Rows travel to their experts and back. Forward: ids are sorted, rows, weights and the count of
// rows per expert follow; afterwards the inverse order brings rows back and each token's are
// summed.
void AppendDispatch(const LowerContext& context, const ExpertRows& rows, OpKernels* op) {
  const std::int64_t routed = Product({rows.total, context.spec.in, context.s});
  const std::int64_t ids = Product({rows.total, kIndexBytes});
  const std::int64_t weights = Product({rows.total, context.s});
  const std::int64_t offsets = Product({context.spec.experts, 4});
  const auto pass = [](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kGatherScatter, DType::kInt64, read, written);
  };
  op->forward = {
      pass(2 * ids, 2 * ids),  // sort
      pass(ids, ids),          // tokens of the sorted rows
      PassKernel(KernelClass::kGatherScatter, context.compute, routed + ids, routed),
      pass(weights + ids, weights),
      pass(ids, ids / 2),      // ids to int32
      pass(ids / 2, offsets),  // histogram
      pass(offsets, offsets),  // running sum
  };
}

void AppendCombine(const LowerContext& context, const ExpertRows& rows, bool dense, OpKernels* op) {
  const DType t = context.compute;
  const std::int64_t tokens = Product({Elements(context), context.s});
  const std::int64_t routed = Product({rows.total, context.spec.in, context.s});
  const std::int64_t ids = Product({rows.total, kIndexBytes});
  const std::int64_t weights = Product({rows.total, context.s});
  op->forward.push_back(PassKernel(KernelClass::kElementwise, t, routed + weights, routed));
  if (!dense) {
    Append({PassKernel(KernelClass::kGatherScatter, DType::kInt64, 0, ids),        // 0, 1, 2, ...
            PassKernel(KernelClass::kGatherScatter, DType::kInt64, 2 * ids, ids),  // inverse
            PassKernel(KernelClass::kGatherScatter, t, routed + ids, routed)},
           &op->forward);
  }
  op->forward.push_back(PassKernel(KernelClass::kElementwise, t, routed, tokens));

  // Backward begins with the token gradients for all rows, brought into the experts' order.
  op->backward_data.push_back(PassKernel(KernelClass::kCopy, t, tokens, routed));
  if (!dense) {
    op->backward_data.push_back(PassKernel(KernelClass::kElementwise, t, 0, routed));
    op->backward_data.push_back(PassKernel(KernelClass::kGatherScatter, t, routed + ids, routed));
  }
  Append({PassKernel(KernelClass::kElementwise, t, routed + weights, routed),
          PassKernel(KernelClass::kElementwise, t, 2 * routed, routed),
          PassKernel(KernelClass::kElementwise, t, routed, weights)},
         &op->backward_data);
}

// Three gradients of one size: of rows around the weighted sum, or of hidden features around the
// gate (two without a gate).
void SetExpertWorkspace(const LowerContext& context, const ExpertRows& rows, OpKernels* op) {
  const OpSpec& spec = context.spec;
  const std::int64_t routed = Product({rows.total, spec.in, context.s});
  const std::int64_t hidden = Product({rows.total, spec.out, context.s});
  const bool hidden_peak = (spec.gated ? 3 : 2) * hidden > 3 * routed;
  const std::int64_t gradient = hidden_peak ? hidden : routed;
  AddTensors({gradient, gradient, hidden_peak && !spec.gated ? 0 : gradient},
             &op->backward_workspace, &op->backward_workspace_tensors);
}

// Backward of grouped experts, as autograd runs it call by call (measured on MixtralExperts with
// `grouped_mm`): each lets go of what it kept, the product of a weight's gradient comes before that
// of the rows', and the gradients of the up and gate weights come last.
std::vector<BackwardMoment> ExpertMoments(const LowerContext& context, const ExpertRows& rows,
                                          const ExpertMlp& middle) {
  const OpSpec& spec = context.spec;
  const std::int64_t tokens = Product({Elements(context), context.s});
  const std::int64_t routed = Product({rows.total, spec.in, context.s});
  const std::int64_t hidden = Product({rows.total, spec.out, context.s});
  const std::int64_t weights = Product({rows.total, context.s});
  const std::int64_t ids = Product({rows.total, kIndexBytes});
  const std::int64_t matrix = Product({spec.experts, spec.in, spec.out, context.s});
  const std::int64_t inputs = tokens + Product({Rows(context), spec.experts, context.s});
  const std::int64_t all_weights = (spec.gated ? 3 : 2) * matrix;
  const auto moment = [&](std::int64_t alive, std::int64_t weights_to_come) {
    return BackwardMoment{
        .alive = Bytes(alive), .to_come = Bytes(inputs), .weights_to_come = Bytes(weights_to_come)};
  };
  return {
      // Three gradients of rows around the weighted sum.
      moment(middle.saved + routed + weights + ids + 3 * routed, all_weights),
      // The down projection: its result's gradient, its operand's.
      moment(middle.saved + weights + routed + hidden, all_weights - matrix),
      // The activation: its result's gradient, its inputs', and nothing of the product's operand.
      moment(middle.saved - hidden + weights + hidden + middle.gradients, all_weights - matrix),
      // The up projection (and the gate): its result's gradient and the rows'.
      moment(middle.gradients + weights + routed, 0),
      // The rows' gradients put into zeros of the tokens', where the rows were kept until now.
      BackwardMoment{.alive = Bytes(tokens)},
  };
}

}  // namespace

// Experts of expert parallel, as torchtitan's (models/common/moe.py, token_dispatcher.py): rows
// that arrived rank by rank are brought into the experts' order, and back behind the products.
static OpKernels LowerRoutedExperts(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const ExpertRows rows = {.total = Rows(context),
                           .per_expert = CeilDiv(Rows(context), spec.experts)};
  const std::int64_t routed = Product({rows.total, spec.in, context.s});
  const std::int64_t ids = Product({rows.total, kIndexBytes});
  const auto move = PassKernel(KernelClass::kGatherScatter, context.compute, routed + ids, routed);
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kGatherScatter, DType::kInt64, ids, ids), move};
  op.backward_data = {move};
  const ExpertMlp middle = AppendExpertMlp(context, rows, &op);
  op.forward.push_back(move);
  Append({PassKernel(KernelClass::kElementwise, context.compute, 0, routed), move},
         &op.backward_data);
  // Kept: the rows in the experts' order, what the MLP keeps, and the order.
  AddTensors({middle.saved, routed, ids}, &op.extra_saved, &op.extra_saved_tensors);
  AddTensors({routed}, &op.forward_workspace, &op.forward_workspace_tensors);
  SetExpertWorkspace(context, rows, &op);
  op.output_aliases = {-1};
  ApplyAutocast(context, Product({spec.experts, spec.in, spec.out, spec.gated ? 3 : 2}), &op);
  return op;
}

// Tokens are copied in the order of their experts; the weights follow. Kept: both index vectors.
OpKernels LowerDispatch(const LowerContext& context) {
  const std::int64_t rows = Product({Rows(context), context.spec.experts_per_token});
  const std::int64_t routed = Product({rows, context.spec.in, context.s});
  const std::int64_t tokens = Product({Elements(context), context.s});
  const std::int64_t ids = Product({rows, kIndexBytes});
  const std::int64_t weights = Product({rows, kFp32Bytes});
  const auto pass = [](DType dtype, std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kGatherScatter, dtype, read, written);
  };
  OpKernels op;
  op.forward = {pass(DType::kInt64, 2 * ids, 2 * ids), pass(DType::kFp32, weights + ids, weights),
                pass(DType::kInt64, ids, ids), pass(context.compute, routed + ids, routed)};
  op.backward_data = {PassKernel(KernelClass::kElementwise, context.compute, 0, tokens),
                      pass(context.compute, routed + ids, tokens)};
  AddTensors({ids, ids}, &op.extra_saved, &op.extra_saved_tensors);
  op.output_aliases = {-1};
  return op;
}

// No kernel: Walker makes a collective of it, both ways.
// Tokens that are exchanged for heads are put in the order of ranks before, and of tokens behind.
OpKernels LowerExchange(const LowerContext& context) {
  OpKernels op;
  if (context.spec.context_ranks > 0) {
    const std::int64_t bytes = Product({Elements(context), context.s});
    op.forward.assign(2, PassKernel(KernelClass::kCopy, context.compute, bytes, bytes));
    op.backward_data = op.forward;
  }
  op.output_aliases = {-1};
  op.compute_intensive = true;  // selective checkpointing keeps what came (torchtitan's list)
  return op;
}

// Rows times weights in fp32, back in the compute dtype, summed per token. Kept: both factors.
OpKernels LowerCombine(const LowerContext& context) {
  const DType t = context.compute;
  const bool casts = t != DType::kFp32;
  const std::int64_t rows = Product({Rows(context), context.spec.experts_per_token});
  const std::int64_t routed = Product({rows, context.spec.in, context.s});
  const std::int64_t wide = Product({rows, context.spec.in, kFp32Bytes});
  const std::int64_t tokens = Product({Elements(context), context.s});
  const std::int64_t ids = Product({rows, kIndexBytes});
  const std::int64_t weights = Product({rows, kFp32Bytes});
  const std::int64_t scores = Product({Rows(context), context.spec.experts, context.s});
  const auto pass = [](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kElementwise, DType::kFp32, read, written);
  };
  const std::vector<Kernel> widen(casts ? 1 : 0,
                                  PassKernel(KernelClass::kCopy, DType::kFp32, routed, wide));
  const std::vector<Kernel> narrow(casts ? 1 : 0, PassKernel(KernelClass::kCopy, t, wide, routed));
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kElementwise, t, 0, tokens)};
  Append(widen, &op.forward);
  Append({pass(wide + weights, wide)}, &op.forward);
  Append(narrow, &op.forward);
  Append({PassKernel(KernelClass::kGatherScatter, t, routed + ids, tokens)}, &op.forward);
  op.backward_data = {PassKernel(KernelClass::kGatherScatter, t, routed + ids, routed)};
  Append(widen, &op.backward_data);
  Append({pass(2 * wide, wide), pass(wide, weights), pass(wide + weights, wide)},
         &op.backward_data);
  Append(narrow, &op.backward_data);
  Append({PassKernel(KernelClass::kGatherScatter, DType::kFp32, weights + ids, scores)},
         &op.backward_data);
  op.saves_input = casts ? 0 : 1;
  AddTensors({casts ? wide : 0, weights}, &op.extra_saved, &op.extra_saved_tensors);
  AddTensors({wide, casts ? routed : 0}, &op.forward_workspace, &op.forward_workspace_tensors);
  AddTensors({routed, wide, casts ? wide : 0}, &op.backward_workspace,
             &op.backward_workspace_tensors);
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerExperts(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  if (spec.routed) {
    return LowerRoutedExperts(context);
  }
  const DType t = context.compute;
  const std::int64_t tokens = Rows(context);
  const bool dense = context.options.moe_dispatch == MoeDispatch::kDense;
  ExpertRows rows;
  rows.total = Product({tokens, dense ? spec.experts : spec.experts_per_token});
  rows.per_expert = CeilDiv(rows.total, spec.experts);
  const std::int64_t token_bytes = Product({tokens, spec.in, context.s});
  const std::int64_t routed = Product({rows.total, spec.in, context.s});
  const std::int64_t ids = Product({rows.total, kIndexBytes});
  const std::int64_t weights = Product({rows.total, context.s});

  OpKernels op;
  if (!dense) {
    AppendDispatch(context, rows, &op);
  }
  OpKernels mlp;
  const ExpertMlp middle = AppendExpertMlp(context, rows, &mlp);
  Append(mlp.forward, &op.forward);
  AppendCombine(context, rows, dense, &op);
  Append(mlp.backward_data, &op.backward_data);
  op.backward_weight = mlp.backward_weight;
  if (dense) {  // every expert's gradient of the same tokens
    op.backward_data.push_back(PassKernel(KernelClass::kElementwise, t, routed, token_bytes));
  } else {  // both gathers of forward, turned round: into zeros
    Append({PassKernel(KernelClass::kElementwise, t, 0, token_bytes),
            PassKernel(KernelClass::kGatherScatter, t, routed + ids, token_bytes),
            PassKernel(KernelClass::kElementwise, t, 0, weights),
            PassKernel(KernelClass::kGatherScatter, t, weights + ids, weights)},
           &op.backward_data);
  }

  // Kept: the routed copies (dense: the tokens themselves), what the MLP keeps, both factors of the
  // weighted sum, and of the dispatch three vectors of row indices (the order, its tokens, its
  // inverse) and the int32 offsets of the experts.
  op.saves_input = dense ? 1 : 0;
  op.saves_input_for_weight = op.saves_input;
  const std::int64_t dispatch = dense ? 0 : routed + 2 * ids + Product({spec.experts, 4});
  AddTensors({middle.saved, routed, weights, dense ? 0 : ids, dispatch}, &op.extra_saved,
             &op.extra_saved_tensors);
  // Weighted rows, and those rows in the tokens' order.
  AddTensors({routed, dense ? 0 : routed}, &op.forward_workspace, &op.forward_workspace_tensors);
  if (dense || context.options.host_kernels || context.options.cuda_kernels) {
    SetExpertWorkspace(context, rows, &op);
  } else {
    op.early_tensors = 4;
    op.moments = ExpertMoments(context, rows, middle);
  }
  op.output_aliases = {-1};
  ApplyAutocast(context, Product({spec.experts, spec.in, spec.out, spec.gated ? 3 : 2}), &op);
  return op;
}

}  // namespace shardwright::internal
