// Convolutions, pools, batch norm.
//
// Images are (batch, channels, height, width). Convolutions go to cuDNN if it takes them; pools and
// batch norms are always our own.

#include <cstdint>

#include "executor/cuda/kernels/batch_norm.h"
#include "executor/cuda/kernels/convolution.h"
#include "executor/cuda/kernels/pool.h"
#include "executor/cuda/ops/launch.h"

namespace shardwright::ops {
namespace {

// The shape of the op, the same in all passes.
gpu::ConvArgs ConvOf(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  gpu::ConvArgs args;
  args.tokens_out = spec.tokens_out;
  args.batch = call.batch;
  args.in = spec.in;
  args.out = spec.out;
  args.groups = spec.groups;
  args.height = spec.height;
  args.width = spec.width;
  args.height_out = spec.height_out;
  args.width_out = spec.width_out;
  args.kernel = spec.kernel;
  args.stride = spec.stride;
  args.padding = spec.padding;
  args.multiply_as = MultiplyAs(call.compute, call.compute);
  return args;
}

// Example: 32 samples, 1 group, 12,544 output pixels, 64 channels: 32 x 196 x 1 blocks of 64 x 64
// results. Shared memory is that of fp32 operands, which suffices for 16-bit ones, too.
template <class Kernel>
void LaunchProduct(const OpContext& context, std::int64_t count, std::int64_t rows,
                   std::int64_t columns, const gpu::ConvArgs& args) {
  LaunchKernel<Kernel>(
      context.gpu, context.stream,
      count * CeilDiv(rows, gpu::kProductRows) * CeilDiv(columns, gpu::kProductColumns),
      gpu::ProductShared<float>(), args);
}

// Up to three gradients: of the image, the weight and the bias. In the data gradient args.x is
// written, in the weight gradient it is read.
void ConvBackward(const ModelOpCall& call, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  gpu::ConvArgs args = ConvOf(call);
  args.y = ArrayOf(call.output_grads[0]);
  const std::int64_t in = spec.in / spec.groups;
  if (Wants(call.input_grads, 0)) {
    args.x = ArrayOf(call.input_grads[0]);
    args.w = ArrayOf(call.params[0]);
    if (!ConvolveByLibrary(context, args, ConvPass::kDataGrad, call.workspace)) {
      LaunchProduct<gpu::ConvDataGradKernel>(context, call.batch * spec.groups,
                                             spec.height * spec.width, in, args);
    }
  }
  if (Wants(call.param_grads, 0)) {
    args.x = ArrayOf(call.inputs[0]);
    args.grad = ArrayOf(call.param_grads[0].view);
    args.adds = call.param_grads[0].accumulate;
    if (!ConvolveByLibrary(context, args, ConvPass::kWeightGrad, call.workspace)) {
      LaunchProduct<gpu::ConvWeightGradKernel>(context, spec.groups, spec.out / spec.groups,
                                               in * spec.kernel * spec.kernel, args);
    }
  }
  if (Wants(call.param_grads, 1)) {
    args.grad = ArrayOf(call.param_grads[1].view);
    args.adds = call.param_grads[1].accumulate;
    LaunchBlocks<gpu::ConvBiasGradKernel>(context, spec.out, args);
  }
}

void SubmitConv(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  if (is_backward) {
    return ConvBackward(call, context);
  }
  const OpSpec& spec = *call.spec;
  gpu::ConvArgs args = ConvOf(call);
  args.x = ArrayOf(call.inputs[0]);
  args.w = ArrayOf(call.params[0]);
  args.bias = spec.has_bias ? ArrayOf(call.params[1]) : gpu::Array{};
  args.y = ArrayOf(call.outputs[0]);
  if (!ConvolveByLibrary(context, args, ConvPass::kForward, call.workspace)) {
    LaunchProduct<gpu::ConvKernel>(context, call.batch * spec.groups,
                                   spec.height_out * spec.width_out, spec.out / spec.groups, args);
  }
}

// A global pool has the whole image as its window: kernel 7 on 7 x 7. Its average divides by 49.
// Max pools save the places of the maxima, 4 bytes per output.
void SubmitPool(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  gpu::PoolArgs args;
  args.planes = call.batch * spec.in;
  args.height = spec.height;
  args.width = spec.width;
  args.height_out = spec.height_out;
  args.width_out = spec.width_out;
  args.kernel = spec.kernel;
  args.stride = spec.stride;
  args.padding = spec.padding;
  args.is_global = spec.height_out == 1 && spec.width_out == 1 && spec.kernel == spec.height &&
                   spec.stride == spec.height && spec.padding == 0;
  const std::int64_t window = args.is_global ? spec.height * spec.width : spec.kernel * spec.kernel;
  args.average = 1.0F / static_cast<float>(window);
  args.places = reinterpret_cast<std::int32_t*>(call.saved.data());
  args.x = is_backward ? ArrayOf(call.input_grads[0]) : ArrayOf(call.inputs[0]);
  args.y = is_backward ? ArrayOf(call.output_grads[0]) : ArrayOf(call.outputs[0]);
  const std::int64_t outputs = args.planes * spec.height_out * spec.width_out;
  const std::int64_t inputs = args.planes * spec.height * spec.width;
  if (spec.kind == OpKind::kMaxPool) {
    if (is_backward) {
      LaunchItems<gpu::MaxPoolGradKernel>(context, inputs, args);
    } else {
      LaunchItems<gpu::MaxPoolKernel>(context, outputs, args);
    }
  } else if (is_backward) {
    LaunchItems<gpu::AvgPoolGradKernel>(context, inputs, args);
  } else {
    LaunchItems<gpu::AvgPoolKernel>(context, outputs, args);
  }
}

// Saved: mean and inverse of each channel, then the count of elements. Statistics of several ranks
// come in two parts with an exchange between them:
//
//   forward    part 1: own mean, squares, count -> exchange; part 2: join all, normalize
//   backward   part 1: own sums, weight and bias gradients -> exchange; part 2: dx
//
// Number of ranks: the exchange of 4 ranks with 64 channels has 4 x 129 numbers.
void SubmitBatchNorm(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  gpu::BatchNormArgs args;
  args.x = ArrayOf(call.inputs[0]);
  args.weight = ArrayOf(call.params[0]);
  args.batch = call.batch;
  args.channels = spec.in;
  args.plane = spec.height * spec.width;
  args.epsilon = static_cast<float>(spec.epsilon);
  args.running = call.buffers;
  args.uses_running = !call.is_training && call.buffers != nullptr;
  args.means = reinterpret_cast<float*>(call.saved.data());
  args.inverses = args.means + spec.in;
  if (call.part != OpPart::kWhole) {
    args.is_before = call.part == OpPart::kBeforeExchange;
    args.is_after = !args.is_before;
    args.exchange = reinterpret_cast<float*>(call.exchange.data());
    args.ranks =
        static_cast<std::int64_t>(call.exchange.size() / sizeof(float)) / (2 * spec.in + 1);
    args.count = args.means + 2 * spec.in;
  }
  if (!is_backward) {
    if (args.is_before) {
      LaunchBlocks<gpu::BatchNormStatsKernel, double>(context, spec.in, args);
      return;
    }
    args.bias = ArrayOf(call.params[1]);
    args.y = ArrayOf(call.outputs[0]);
    LaunchBlocks<gpu::BatchNormStatsKernel, double>(context, spec.in, args);
    LaunchItems<gpu::BatchNormKernel>(context, gpu::BatchNormKernel::Items(args), args);
    return;
  }
  args.dy = ArrayOf(call.output_grads[0]);
  args.dx = ArrayOf(call.input_grads[0]);
  if (Wants(call.param_grads, 0)) {
    args.weight_grad = ArrayOf(call.param_grads[0].view);
    args.adds_weight = call.param_grads[0].accumulate;
  }
  if (Wants(call.param_grads, 1)) {
    args.bias_grad = ArrayOf(call.param_grads[1].view);
    args.adds_bias = call.param_grads[1].accumulate;
  }
  LaunchBlocks<gpu::BatchNormGradKernel, double>(context, spec.in, args);
}

}  // namespace

void SubmitImage(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  switch (call.spec->kind) {
    case OpKind::kConv2d:
      return SubmitConv(call, is_backward, context);
    case OpKind::kBatchNorm:
      return SubmitBatchNorm(call, is_backward, context);
    default:
      return SubmitPool(call, is_backward, context);
  }
}

}  // namespace shardwright::ops
