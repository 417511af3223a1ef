// Layer norm, RMS norm and rotary embeddings.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

// A norm that is one kernel each way. `statistics` fp32 numbers per row are kept, `parameters`
// vectors of `in` elements are learned.
OpKernels FusedNorm(const LowerContext& context, std::int64_t statistics, std::int64_t parameters) {
  const std::int64_t in = context.spec.in;
  const std::int64_t rows = Rows(context);
  const std::int64_t e = Product({rows, in, context.s});
  const std::int64_t stats = Product({rows, statistics, kFp32Bytes});
  const std::int64_t weights = Product({in, parameters, context.s});
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kNorm, context.compute, e + weights, e + stats)};
  op.backward_data = {
      PassKernel(KernelClass::kNorm, context.compute, 2 * e + stats + Product({in, context.s}), e)};
  if (context.options.fused_reductions) {
    // The data-gradient kernel leaves one fp32 partial sum per 16 rows, at most 128 in all; the
    // second kernel adds them up.
    const std::int64_t partials =
        Product({std::min<std::int64_t>(128, CeilDiv(rows, 16)), in, parameters, kFp32Bytes});
    op.backward_data[0].written += Bytes(partials);
    op.backward_weight = {PassKernel(KernelClass::kNorm, context.compute, partials, weights)};
    op.backward_workspace = Bytes(partials);
  } else {
    op.backward_weight = {PassKernel(KernelClass::kNorm, context.compute, 2 * e + stats, weights)};
  }
  op.saves_input = 1;
  op.extra_saved = Bytes(stats);
  op.output_aliases = {-1};
  op.output_recomputed = RecomputesOutputs(context);
  return op;
}

// The gradient of x32 * rsqrt(x32.pow(2).mean(-1) + eps) over `f` bytes in rows of `r`, all fp32.
void AppendNormalizedGradient(std::int64_t f, std::int64_t r, std::vector<Kernel>* back) {
  const DType fp32 = DType::kFp32;
  const auto pass = [back](std::int64_t read, std::int64_t written) {
    back->push_back(PassKernel(KernelClass::kElementwise, DType::kFp32, read, written));
  };
  pass(f + r, f);                                               // dy * rsqrt
  pass(2 * f, f);                                               // dy * x32
  back->push_back(PassKernel(KernelClass::kNorm, fp32, f, r));  // its sum over features
  pass(r, r);                                                   // rsqrt^3
  pass(r, r);                                                   // gradient * -0.5
  pass(2 * r, r);                                               // their product
  pass(r, f);                                                   // mean: expand / in
  pass(f, f);                                                   // pow: x32^1
  pass(f, f);                                                   // * 2
  pass(2 * f, f);                                               // * gradient
  pass(2 * f, f);                                               // sum of both paths
}

// RMSNorm written out in PyTorch operations, as Hugging Face and early Llama code do:
//   x32 = x.float(); y = x32 * rsqrt(x32.pow(2).mean(-1) + eps); out = weight * y.to(x.dtype)
// Autograd keeps x32 (pow, mul), the rsqrt result (rsqrt, mul) and y in the compute dtype (mul by
// weight); not x, because a cast keeps nothing. In fp32 the casts vanish and x itself is kept.
// T5 multiplies x by the rsqrt, not its copy: x is kept, too, and gets two gradients.
// Gemma multiplies before it casts, out = (y * (1 + weight.float())).to(x.dtype): y and the sum are
// kept in fp32.
OpKernels EagerRmsNorm(const LowerContext& context) {
  const std::int64_t in = context.spec.in;
  const std::int64_t rows = Rows(context);
  const bool casts = context.compute != DType::kFp32;
  const bool offset = context.spec.weight_offset != 0.0;
  const bool keeps_input = !casts || context.spec.scales_input;
  const std::int64_t e = Product({rows, in, context.s});   // compute dtype
  const std::int64_t f = Product({rows, in, kFp32Bytes});  // fp32
  const std::int64_t r = Product({rows, kFp32Bytes});      // one fp32 per row
  const std::int64_t w = Product({in, context.s});
  const DType fp32 = DType::kFp32;
  // Of y, of the weight and of their product.
  const DType scaled = offset ? fp32 : context.compute;
  const std::int64_t y = offset ? f : e;
  const std::int64_t weight = offset ? Product({in, kFp32Bytes}) : w;
  OpKernels op;
  const auto pass = [](DType dtype, std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kElementwise, dtype, read, written);
  };
  const auto cast = [casts](DType to, std::int64_t read, std::int64_t written,
                            std::vector<Kernel>* kernels) {
    if (casts) {
      kernels->push_back(PassKernel(KernelClass::kCopy, to, read, written));
    }
  };
  cast(fp32, e, f, &op.forward);
  op.forward.push_back(pass(fp32, f, f));                            // pow(2)
  op.forward.push_back(PassKernel(KernelClass::kNorm, fp32, f, r));  // mean
  op.forward.push_back(pass(fp32, r, r));                            // + eps
  op.forward.push_back(pass(fp32, r, r));                            // rsqrt
  op.forward.push_back(pass(fp32, (keeps_input ? e : f) + r, f));    // x32 * rsqrt
  if (offset) {
    cast(fp32, w, weight, &op.forward);
    op.forward.push_back(pass(fp32, weight, weight));  // 1 + weight
    op.forward.push_back(pass(fp32, f + weight, f));   // their product
    cast(context.compute, f, e, &op.forward);
    cast(fp32, e, f, &op.backward_data);
    op.backward_data.push_back(pass(fp32, f + weight, f));
  } else {
    cast(context.compute, f, e, &op.forward);
    op.forward.push_back(pass(context.compute, e + w, e));  // * weight
    op.backward_data.push_back(pass(context.compute, e + w, e));
    cast(fp32, e, f, &op.backward_data);
  }
  AppendNormalizedGradient(f, r, &op.backward_data);
  cast(context.compute, f, e, &op.backward_data);
  if (casts && keeps_input) {
    cast(context.compute, f, e, &op.backward_data);
  }
  // Gradient of the weight: dout * y, then the sum over rows.
  op.backward_weight = {pass(scaled, 2 * y, y), PassKernel(KernelClass::kNorm, scaled, y, weight)};
  if (offset) {
    cast(context.compute, weight, w, &op.backward_weight);
  }
  op.saves_input = keeps_input ? 1 : 0;
  AddTensors({casts ? f : 0, r, y, offset ? weight : 0}, &op.extra_saved, &op.extra_saved_tensors);
  // Forward peak, at the second cast: x32, the product and y, or with an offset x32, y, the product
  // and the output; without casts: x32^2 alone.
  op.forward_workspace = Bytes(!casts ? 0 : offset ? f : f - e);
  // Backward peak, inside pow's formula: first path, expanded mean, x32^1, twice it, the product.
  AddTensors({f, f, f, f, f - e}, &op.backward_workspace, &op.backward_workspace_tensors);
  op.output_aliases = {-1};
  return op;
}

}  // namespace

OpKernels LowerLayerNorm(const LowerContext& context) {
  // Mean and reciprocal deviation per row; weight and optional bias.
  return FusedNorm(context, 2, context.spec.has_bias ? 2 : 1);
}

OpKernels LowerRmsNorm(const LowerContext& context) {
  return context.options.fused_norm ? FusedNorm(context, 1, 1) : EagerRmsNorm(context);
}

OpKernels LowerRope(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t rows = Rows(context);
  const std::int64_t q = Product({rows, spec.heads, spec.head_dim, context.s});
  const std::int64_t k = Product({rows, spec.kv_heads, spec.head_dim, context.s});
  // cos and sin are constants of the sequence, shared by samples and heads.
  const std::int64_t table = Product({2, spec.rows, spec.head_dim, context.s});
  OpKernels op;
  op.output_aliases = {-1, -1};
  if (context.options.fused_rope) {
    op.forward = {PassKernel(KernelClass::kElementwise, context.compute, q + k + table, q + k)};
    op.backward_data = op.forward;
    if (context.options.inplace_rope) {
      op.output_aliases = {0, 1};
    }
    return op;
  }
  // x * cos + rotate_half(x) * sin for q, then for k: multiply, negate half, concatenate, multiply,
  // add. The products keep only cos and sin, because those need no gradient. Backward: multiply;
  // each half goes into zeros, one of them negated first; the halves are added; multiply; add.
  const auto pass = [&context](std::int64_t read, std::int64_t written) {
    return PassKernel(KernelClass::kElementwise, context.compute, read, written);
  };
  const std::int64_t angles = table / 2;
  for (const std::int64_t x : {q, k}) {
    const std::int64_t half = x / 2;
    for (const Kernel& kernel :
         {pass(x + angles, x), pass(half, half), pass(x, x), pass(x + angles, x), pass(2 * x, x)}) {
      op.forward.push_back(kernel);
    }
    for (const Kernel& kernel :
         {pass(x + angles, x), pass(0, x), pass(half, half), pass(half, half), pass(0, x),
          pass(half, half), pass(2 * x, x), pass(x + angles, x), pass(2 * x, x)}) {
      op.backward_data.push_back(kernel);
    }
  }
  // Peak of one tensor: both products and the rotated copy, of which one is counted as the output.
  const std::int64_t largest = std::max(q, k);
  AddTensors({largest, largest}, &op.forward_workspace, &op.forward_workspace_tensors);
  AddTensors({largest, largest}, &op.backward_workspace, &op.backward_workspace_tensors);
  return op;
}

}  // namespace shardwright::internal
