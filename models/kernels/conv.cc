// Convolution, batch norm and pooling on (channels, height, width) images.

#include <cstdint>
#include <vector>

#include "models/kernels/kernels.h"

namespace shardwright::internal {
namespace {

std::int64_t InputElements(const LowerContext& context) {
  return Product({context.batch, context.spec.in, context.spec.height, context.spec.width});
}

// For pooling, whose channel count stays.
std::int64_t PooledElements(const LowerContext& context) {
  return Product({context.batch, context.spec.in, context.spec.height_out, context.spec.width_out});
}

// Each first pass ends where ranks exchange what it has summed, `sums` bytes: mean and spread of
// each channel with the number of elements, then the two sums of backward. The number is kept.
void Synchronize(std::int64_t sums, OpKernels* op) {
  const auto split = [](std::vector<Kernel>* kernels, Exchange* exchange, std::int64_t bytes) {
    exchange->before = {kernels->front()};
    exchange->bytes = Bytes(bytes);
    kernels->erase(kernels->begin());
  };
  split(&op->forward, &op->forward_exchange, sums + kFp32Bytes);
  split(&op->backward_data, &op->backward_exchange, sums);
  op->extra_saved += Bytes(kFp32Bytes);
}

}  // namespace

OpKernels LowerConv2d(const LowerContext& context) {
  const OpSpec& spec = context.spec;
  const std::int64_t s = context.s;
  const std::int64_t pixels = Product({context.batch, spec.height_out, spec.width_out});
  const std::int64_t taps = Product({spec.in / spec.groups, spec.kernel, spec.kernel});
  const std::int64_t input = Product({InputElements(context), s});
  const std::int64_t output = Product({pixels, spec.out, s});
  const std::int64_t weight = Product({spec.out, taps, s});
  const std::int64_t bias = spec.has_bias ? Product({spec.out, s}) : 0;

  Kernel conv;
  conv.kind = KernelClass::kConv;
  conv.dtype = context.compute;
  conv.batch = spec.groups;
  conv.m = pixels;
  conv.n = spec.out / spec.groups;
  conv.k = taps;
  conv.flops = Flops(2.0 * static_cast<double>(pixels) * static_cast<double>(spec.out) *
                     static_cast<double>(taps));
  // One launch that reads and writes other tensors of the same convolution.
  const auto with_bytes = [&conv](std::int64_t read, std::int64_t written) {
    Kernel kernel = conv;
    kernel.read = Bytes(read);
    kernel.written = Bytes(written);
    return kernel;
  };
  OpKernels op;
  op.forward = {with_bytes(input + weight, output)};
  if (spec.has_bias) {
    if (context.options.fused_elementwise) {
      op.forward[0].read += Bytes(bias);
    } else {  // PyTorch adds the bias in place after the library's convolution
      op.forward.push_back(
          PassKernel(KernelClass::kElementwise, context.compute, output + bias, output));
    }
  }
  op.backward_data = {with_bytes(output + weight, input)};
  if (!spec.bias_only) {  // PyTorch keeps the input all the same
    op.backward_weight = {with_bytes(input + output, weight)};
  }
  if (spec.has_bias) {
    op.backward_weight.push_back(
        PassKernel(KernelClass::kElementwise, context.compute, output, bias));
  }
  op.saves_input = 1;
  op.saves_input_for_weight = spec.bias_only ? 0 : 1;
  op.output_aliases = {-1};
  op.compute_intensive = true;
  ApplyAutocast(context, Product({spec.out, taps}) + (spec.has_bias ? spec.out : 0), &op);
  return op;
}

OpKernels LowerBatchNorm(const LowerContext& context) {
  const std::int64_t e = Product({InputElements(context), context.s});
  const std::int64_t channel = Product({context.spec.in, kFp32Bytes});
  OpKernels op;
  // Two passes over the input: statistics over the batch, then the normalised output; running mean
  // and variance are read and written. Weight, bias and statistics are fp32 vectors.
  op.forward = {
      PassKernel(KernelClass::kNorm, context.compute, e + 2 * channel, 4 * channel),
      PassKernel(KernelClass::kElementwise, context.compute, e + 4 * channel, e),
  };
  // Two passes: the sums that are also the gradients of weight and bias, then the input gradient.
  op.backward_data = {
      PassKernel(KernelClass::kNorm, context.compute, 2 * e + 2 * channel, 2 * channel),
      PassKernel(KernelClass::kElementwise, context.compute, 2 * e + 5 * channel, e),
  };
  op.saves_input = 1;
  op.extra_saved = Bytes(2 * channel);  // mean and reciprocal deviation
  op.output_aliases = {-1};
  if (context.spec.synchronized) {
    Synchronize(2 * channel, &op);
  }
  return op;
}

OpKernels LowerMaxPool(const LowerContext& context) {
  const std::int64_t input = Product({InputElements(context), context.s});
  const std::int64_t output = Product({PooledElements(context), context.s});
  const std::int64_t indices = Product({PooledElements(context), kIndexBytes});
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kElementwise, context.compute, input, output + indices)};
  op.backward_data = {
      PassKernel(KernelClass::kGatherScatter, context.compute, output + indices, input)};
  op.saves_input = 1;  // the derivative formula takes the input, for its shape
  op.extra_saved = Bytes(indices);
  op.output_aliases = {-1};
  return op;
}

OpKernels LowerAvgPool(const LowerContext& context) {
  const std::int64_t input = Product({InputElements(context), context.s});
  const std::int64_t output = Product({PooledElements(context), context.s});
  OpKernels op;
  op.forward = {PassKernel(KernelClass::kElementwise, context.compute, input, output)};
  op.backward_data = {PassKernel(KernelClass::kElementwise, context.compute, output, input)};
  // avg_pool2d keeps its input, though it needs only the shape. A pool to one pixel is a mean,
  // which keeps the shape.
  const bool global = context.spec.height_out == 1 && context.spec.width_out == 1;
  op.saves_input = global ? 0 : 1;
  op.output_aliases = {-1};
  return op;
}

}  // namespace shardwright::internal
