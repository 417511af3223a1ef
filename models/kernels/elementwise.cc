// Activations, sums, products, dropout and the moves between tensors.

#include <cstdint>
#include <vector>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// Does the derivative follow from the result, so that autograd keeps the output and not the input?
bool KeepsResult(Activation activation) {
  switch (activation) {
    case Activation::kRelu:
    case Activation::kTanh:
    case Activation::kSigmoid:
      return true;
    case Activation::kNone:
    case Activation::kGelu:
    case Activation::kGeluTanh:
    case Activation::kSilu:
      return false;
  }
  return false;
}

// GELU's tanh form in several operators.
struct GeluPasses {
  std::vector<std::int64_t> forward_reads;   // tensors that each kernel reads; it writes one
  std::vector<std::int64_t> backward_reads;  // sums of gradients of x among them
  int kept = 0;                              // tensors beside x
};

// 0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3))): pow, scale, add, scale, tanh, add one, halve x,
// multiply. Autograd keeps x (pow), the result of tanh, and both factors of the last product.
// Backward: both factors of the product; tanh; two scales; pow's square, triple and product; the
// halving; two sums.
GeluPasses NewGelu() {
  return {.forward_reads = {1, 1, 2, 1, 1, 1, 1, 2},
          .backward_reads = {2, 2, 2, 1, 1, 1, 1, 2, 1, 2, 2},
          .kept = 3};
}

// 0.5 * x * (1 + tanh(x * c * (1 + 0.044715 * x * x))): two scales, multiply, add one, scale,
// multiply, tanh, add one, multiply. Three products of tensors keep both factors, one of them x.
// Backward: two gradients for each of these; tanh; three scales; three sums.
GeluPasses FastGelu() {
  return {.forward_reads = {1, 1, 1, 2, 1, 2, 1, 1, 2},
          .backward_reads = {2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2},
          .kept = 6};
}

bool IsWrittenOut(const LowerContext& context) {
  return context.spec.activation == Activation::kGeluTanh &&
         context.spec.gelu_code != GeluCode::kOneOperator && context.options.python_gelu_tanh;
}

OpKernels WrittenOutGelu(const LowerContext& context, std::int64_t elements) {
  const GeluPasses passes = context.spec.gelu_code == GeluCode::kFast ? FastGelu() : NewGelu();
  OpKernels op;
  for (const std::int64_t reads : passes.forward_reads) {
    AppendElementwise(context, elements, reads, 1, &op.forward);
  }
  for (const std::int64_t reads : passes.backward_reads) {
    AppendElementwise(context, elements, reads, 1, &op.backward_data);
  }
  op.saves_input = 1;
  const std::int64_t e = Product({elements, context.s});
  for (int i = 0; i < passes.kept; ++i) {
    AddTensors({e}, &op.extra_saved, &op.extra_saved_tensors);
  }
  // Peak, at the product: the gradients of both factors, one of them in the place of x's. What
  // comes later (pow's formula holds six tensors with x) fits where the saved factors and tanh
  // were.
  AddTensors({e}, &op.backward_workspace, &op.backward_workspace_tensors);
  return op;
}

}  // namespace

// No kernel moves tokens between ranks: Walker makes a collective of it, both ways. Copied are what
// was gathered of several samples, and what is scattered.
OpKernels LowerMoveTokens(const LowerContext& context) {
  const bool gathers = context.spec.kind == OpKind::kGatherTokens;
  const std::int64_t bytes = Product({Elements(context), context.s});
  const std::vector<Kernel> copy = {PassKernel(KernelClass::kCopy, context.compute, bytes, bytes)};
  OpKernels op;
  if (!gathers || context.batch > 1) {
    op.forward = copy;
  }
  if (gathers || context.batch > 1) {
    op.backward_data = copy;
  }
  op.output_aliases = {-1};
  op.compute_intensive = !gathers;  // selective checkpointing keeps sums (torchtitan's list)
  return op;
}

OpKernels LowerActivation(const LowerContext& context) {
  const std::int64_t elements = Elements(context);
  OpKernels op;
  const Activation activation = context.spec.activation;
  if (IsWrittenOut(context)) {
    op = WrittenOutGelu(context, elements);
  } else if (activation == Activation::kNone) {
    op.output_aliases = {0};
    return op;
  } else {
    AppendElementwise(context, elements, 1, 1, &op.forward);
    AppendElementwise(context, elements, 2, 1, &op.backward_data);
    (KeepsResult(activation) ? op.saves_output : op.saves_input) = 1;
  }
  op.output_aliases = {-1};
  op.output_recomputed = RecomputesOutputs(context) && op.saves_output == 0;
  return op;
}

OpKernels LowerGatedActivation(const LowerContext& context) {
  const std::int64_t elements = Elements(context);
  const bool is_packed = context.spec.packed_gate;
  OpKernels op;
  op.output_aliases = {-1};
  if (context.options.fused_elementwise) {
    AppendElementwise(context, elements, 2, 1, &op.forward);
    AppendElementwise(context, elements, 3, 2, &op.backward_data);
    op.saves_input = is_packed ? 0b1 : 0b11;
    op.overwrites_input = context.options.inplace_gate_gradients ? op.saves_input : 0;
    op.output_recomputed = RecomputesOutputs(context);
    return op;
  }
  if (context.spec.activation == Activation::kNone && !is_packed) {
    return LowerMul(context);
  }
  OpKernels gate;
  if (IsWrittenOut(context)) {
    gate = WrittenOutGelu(context, elements);
  } else {
    AppendElementwise(context, elements, 1, 1, &gate.forward);
    AppendElementwise(context, elements, 2, 1, &gate.backward_data);
  }
  op.forward = gate.forward;
  AppendElementwise(context, elements, 2, 1, &op.forward);        // product
  AppendElementwise(context, elements, 2, 1, &op.backward_data);  // gradient of the activated gate
  AppendElementwise(context, elements, 2, 1, &op.backward_data);  // gradient of up
  op.backward_data.insert(op.backward_data.end(), gate.backward_data.begin(),
                          gate.backward_data.end());
  // The product keeps the activated gate and up; the activation keeps the gate, unless its
  // derivative follows from its result.
  op.saves_input = KeepsResult(context.spec.activation) ? 0b10 : 0b11;
  // Peak of backward: the product's gradients, of the activated gate and of up, beside that of the
  // output. The gate's own comes when the last two are gone, so no scratch is added to the three,
  // nor for a GELU in several operators, whose first two gradients come when the output's and the
  // activated gate are gone.
  const Bytes e(Product({elements, context.s}));
  op.extra_saved = e + gate.extra_saved;
  if (gate.extra_saved > Bytes(0)) {
    op.extra_saved_tensors = gate.extra_saved_tensors;
    op.extra_saved_tensors.push_back(e);
  }
  if (is_packed) {
    // Gate and up are views of one tensor: it is kept as a whole, and their gradients are copied
    // into one of its size (chunk's backward, torch.cat). That is the peak, when the output's
    // gradient is gone: four parts, of which input and output account for three.
    op.saves_input = 0b1;
    op.backward_data.push_back(PassKernel(KernelClass::kCopy, context.compute,
                                          Product({2, elements, context.s}),
                                          Product({2, elements, context.s})));
    op.backward_workspace = e;
  }
  return op;
}

OpKernels LowerAdd(const LowerContext& context) {
  OpKernels op;
  // Fused: one kernel with the norm or sum that follows, which reads the other operand instead of
  // this op's output; so the chain's total is right, see docs/kernel_sets.md.
  AppendElementwise(context, Elements(context), context.options.fused_elementwise ? 1 : 2, 1,
                    &op.forward);
  // Backward passes the gradient on unchanged.
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerMul(const LowerContext& context) {
  const std::int64_t elements = Elements(context);
  OpKernels op;
  AppendElementwise(context, elements, 2, 1, &op.forward);
  if (context.options.fused_elementwise) {
    AppendElementwise(context, elements, 3, 2, &op.backward_data);
  } else {
    AppendElementwise(context, elements, 2, 1, &op.backward_data);
    AppendElementwise(context, elements, 2, 1, &op.backward_data);
  }
  op.saves_input = 0b11;
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerScale(const LowerContext& context) {
  OpKernels op;
  if (context.options.fused_elementwise) {  // a factor in the neighbour's pass
    op.output_aliases = {0};
    return op;
  }
  AppendElementwise(context, Elements(context), 1, 1, &op.forward);
  AppendElementwise(context, Elements(context), 1, 1, &op.backward_data);
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerDropout(const LowerContext& context) {
  const std::int64_t elements = Elements(context);
  const std::int64_t e = Product({elements, context.s});
  const std::int64_t mask = context.options.keeps_dropout_mask ? elements : 0;
  OpKernels op;
  op.output_aliases = {-1};
  if (context.spec.dropout_p <= 0.0) {
    op.output_aliases = {0};
    return op;
  }
  op.extra_saved = Bytes(mask);
  if (context.options.fused_elementwise) {
    // The values ride in the neighbour's pass; only the mask has traffic of its own.
    op.output_aliases = {0};
    if (mask > 0) {
      op.forward = {PassKernel(KernelClass::kElementwise, context.compute, 0, mask)};
      op.backward_data = {PassKernel(KernelClass::kElementwise, context.compute, mask, 0)};
    }
    return op;
  }
  op.forward = {PassKernel(KernelClass::kElementwise, context.compute, e, e + mask)};
  op.backward_data = {PassKernel(KernelClass::kElementwise, context.compute, e + mask, e)};
  return op;
}

OpKernels LowerConcat(const LowerContext& context) {
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kCopy, context.compute,
                           Product({Elements(context), context.s}),
                           Product({Elements(context), context.s}))};
  // The gradients of the parts are views. The class token is one row shared by all samples: its
  // gradient is the sum over the samples.
  op.backward_weight = {PassKernel(KernelClass::kElementwise, context.compute,
                                   Product({context.batch, context.spec.in, context.s}),
                                   Product({context.spec.in, context.s}))};
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerSelect(const LowerContext& context) {
  const std::int64_t e = Product({Elements(context), context.s});
  OpKernels op;
  op.output_aliases = {0};  // a view
  // Backward writes the selected rows into zeros. The zeros are the gradient of the whole input,
  // whose row count the op gives in seq_k; without it only the rows are counted.
  const std::int64_t all =
      Product({context.batch, context.spec.seq_k > 0 ? context.spec.seq_k : context.spec.rows,
               context.spec.in, context.s});
  op.backward_data = {PassKernel(KernelClass::kElementwise, context.compute, 0, all),
                      PassKernel(KernelClass::kCopy, context.compute, e, e)};
  return op;
}

}  // namespace shardwright::internal
