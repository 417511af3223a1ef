// Ops without matrix products: activations, sums, products, dropout, concatenation, selection.
//
// Nearly all of them are one MapKernel: z = op(a, b, c). Example: z = x + bias of 8 rows with 512
// features is n = 4,096 and period 512. Tensors that are read by nobody get no gradient: their view
// has no data.

#include "executor/cuda/kernels/elementwise.h"

#include <cstddef>
#include <cstdint>

#include "executor/cuda/kernels/sums.h"
#include "executor/cuda/ops/launch.h"
#include "executor/op_layout.h"

namespace shardwright::ops {
namespace {

using gpu::MapArgs;
using gpu::MapOp;

// ReLU, tanh and sigmoid have kept their result, the others their input.
void SubmitActivation(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const Activation function = call.spec->activation;
  if (!is_backward) {
    const View& y = call.outputs[0];
    Map(context, {.op = MapOp::kActivate,
                  .activation = function,
                  .n = y.elements,
                  .a = ArrayOf(call.inputs[0]),
                  .z = ArrayOf(y)});
    return;
  }
  const bool keeps_result = function == Activation::kRelu || function == Activation::kTanh ||
                            function == Activation::kSigmoid;
  const View& dx = call.input_grads[0];
  // A function that does nothing keeps nothing: its input may not be there.
  const gpu::Array dy = ArrayOf(call.output_grads[0]);
  const gpu::Array kept = keeps_result ? ArrayOf(call.outputs[0]) : ArrayOf(call.inputs[0]);
  Map(context, {.op = MapOp::kActivateGrad,
                .activation = function,
                .n = dx.elements,
                .a = function == Activation::kNone ? dy : kept,
                .b = dy,
                .z = ArrayOf(dx)});
}

// The second half of each row of a packed gate.
gpu::Array SecondHalf(const gpu::Array& packed, std::int64_t features) {
  const auto bytes = static_cast<std::size_t>(features * SizeOf(packed.dtype));
  return {static_cast<std::byte*>(packed.data) + bytes, packed.dtype};
}

// y = f(gate) up. Inputs are two tensors, or one whose rows hold gate and up side by side
// (packed_gate). Example: packed rows of 2 x 100 features; up begins 100 features behind gate, and
// maps read with `wide`.
//
// Backward makes both gradients in one pass: it reads gate, up and dy, and writes two arrays. Two
// maps would read five and write two.
void SubmitGated(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const bool is_packed = call.spec->packed_gate;
  const std::size_t up_index = is_packed ? 0 : 1;
  const auto wide = [is_packed](std::uint32_t arrays) { return is_packed ? arrays : 0; };
  const auto part = [&](const gpu::Array& of, bool is_up) {
    return is_packed && is_up ? SecondHalf(of, call.spec->in) : of;
  };
  const gpu::Array gate = ArrayOf(call.inputs[0]);
  const gpu::Array up = part(ArrayOf(call.inputs[up_index]), true);
  MapArgs args{.op = MapOp::kGated, .activation = call.spec->activation, .row = call.spec->in};
  args.a = gate;
  if (!is_backward) {
    const View& y = call.outputs[0];
    args.n = y.elements;
    args.wide = wide(1 | 2);
    args.b = up;
    args.z = ArrayOf(y);
    Map(context, args);
    return;
  }
  const gpu::Array dy = ArrayOf(call.output_grads[0]);
  args.n = call.output_grads[0].elements;
  const bool wants_gate = Wants(call.input_grads, 0);
  const bool wants_up = Wants(call.input_grads, up_index);
  if (wants_gate) {
    args.op = wants_up ? MapOp::kGatedGrad : MapOp::kGateGrad;
    args.wide = wide(1 | 2 | 8);
    args.b = up;
    args.c = dy;
    args.z = ArrayOf(call.input_grads[0]);
    args.z2 = wants_up ? part(ArrayOf(call.input_grads[up_index]), true) : gpu::Array{};
    Map(context, args);
  } else if (wants_up) {
    args.wide = wide(1 | 8);
    args.b = dy;
    args.z = part(ArrayOf(call.input_grads[up_index]), true);
    Map(context, args);
  }
}

// b repeated where it has fewer elements than the result.
// Example: a bias of 512 features on 4,096 elements has period 512; equal sizes have 0, no period.
std::int64_t PeriodOf(std::int64_t elements, std::int64_t all) {
  return elements < all ? elements : 0;
}

// Forward of x + y, or x + bias. The gradient of a repeated operand is a sum over its repetitions:
// dy of 8 rows with 512 features is summed to 512 numbers.
void SubmitAdd(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  if (!is_backward) {
    const ConstView& other = call.spec->has_bias ? call.params[0] : call.inputs[1];
    const bool swaps = other.elements > call.inputs[0].elements;
    const ConstView& large = swaps ? other : call.inputs[0];
    const ConstView& small = swaps ? call.inputs[0] : other;
    const View& z = call.outputs[0];
    Map(context, {.op = MapOp::kAdd,
                  .n = z.elements,
                  .period = PeriodOf(small.elements, z.elements),
                  .a = ArrayOf(large),
                  .b = ArrayOf(small),
                  .z = ArrayOf(z)});
    return;
  }
  const ConstView& dy = call.output_grads[0];
  const auto add_into = [&](const View& to, bool adds) {
    if (to.elements == dy.elements) {
      Map(context,
          {.op = MapOp::kCopy, .adds = adds, .n = to.elements, .a = ArrayOf(dy), .z = ArrayOf(to)});
      return;
    }
    SumRows(context,
            {.x = ArrayOf(dy),
             .rows = dy.elements / to.elements,
             .columns = to.elements,
             .stride = to.elements},
            ArrayOf(to), adds, nullptr);
  };
  for (const View& dx : call.input_grads) {
    if (dx.data != nullptr) {
      add_into(dx, false);
    }
  }
  for (const ParamGrad& grad : call.param_grads) {
    if (grad.view.data != nullptr) {
      add_into(grad.view, grad.accumulate);
    }
  }
}

// x times a factor for each element, for each feature, or for each channel of images. The last one
// has its own kernel for the factor's gradient.
void SubmitMul(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const std::int64_t plane = ScalesChannels(call) ? call.spec->rows : 0;
  if (!is_backward) {
    const View& z = call.outputs[0];
    Map(context, {.op = MapOp::kMul,
                  .n = z.elements,
                  .period = plane > 0 ? 0 : PeriodOf(call.inputs[1].elements, z.elements),
                  .plane = plane,
                  .a = ArrayOf(call.inputs[0]),
                  .b = ArrayOf(call.inputs[1]),
                  .z = ArrayOf(z)});
    return;
  }
  const gpu::Array dz = ArrayOf(call.output_grads[0]);
  if (Wants(call.input_grads, 0)) {
    const View& dx = call.input_grads[0];
    Map(context, {.op = MapOp::kMul,
                  .n = dx.elements,
                  .period = plane > 0 ? 0 : PeriodOf(call.inputs[1].elements, dx.elements),
                  .plane = plane,
                  .a = dz,
                  .b = ArrayOf(call.inputs[1]),
                  .z = ArrayOf(dx)});
  }
  if (!Wants(call.input_grads, 1)) {
    return;
  }
  const View& dfactor = call.input_grads[1];
  if (plane > 0) {
    LaunchBlocks<gpu::ChannelScaleGradKernel>(
        context, call.batch * call.spec->in,
        {.x = ArrayOf(call.inputs[0]), .y = dz, .z = ArrayOf(dfactor), .plane = plane});
    return;
  }
  Map(context, {.op = MapOp::kMul,
                .n = dfactor.elements,
                .a = dz,
                .b = ArrayOf(call.inputs[0]),
                .z = ArrayOf(dfactor)});
}

// Forward and backward are the same: times a constant.
void SubmitScale(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const View& to = is_backward ? call.input_grads[0] : call.outputs[0];
  const ConstView& from = is_backward ? call.output_grads[0] : call.inputs[0];
  Map(context, {.op = MapOp::kScale,
                .factor = static_cast<float>(call.spec->factor),
                .n = to.elements,
                .a = ArrayOf(from),
                .z = ArrayOf(to)});
}

// Backward uses the mask of forward, made anew from the same counters. In evaluation it is a copy.
void SubmitDropout(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const View& to = is_backward ? call.input_grads[0] : call.outputs[0];
  const ConstView& from = is_backward ? call.output_grads[0] : call.inputs[0];
  const std::int64_t elements = call.spec->rows * call.spec->in;
  if (!call.is_training || call.spec->dropout_p <= 0.0) {
    Map(context, {.n = call.batch * elements, .a = ArrayOf(from), .z = ArrayOf(to)});
    return;
  }
  LaunchItems<gpu::DropoutKernel>(context, CeilDiv(call.batch * elements, gpu::kVector),
                                  {.x = ArrayOf(from),
                                   .y = ArrayOf(to),
                                   .samples = call.batch,
                                   .elements = elements,
                                   .mask = MaskOf(call)});
}

// `count` elements of every sample from one tensor to another; strides are between samples.
struct SamplePart {
  gpu::Array array;
  std::int64_t first = 0, stride = 0;
};
// Example: class tokens before patches. `from.stride` 0 repeats one row for all samples.
void CopySamples(const OpContext& context, std::int64_t samples, std::int64_t count,
                 const SamplePart& from, const SamplePart& to) {
  const gpu::CopyRowsArgs args{.from = from.array,
                               .to = to.array,
                               .rows = samples,
                               .features = count,
                               .from_first = from.first,
                               .from_stride = from.stride,
                               .to_first = to.first,
                               .to_stride = to.stride};
  LaunchItems<gpu::CopyRowsKernel>(context, gpu::CopyRowsKernel::Items(args), args);
}

// Parameters come first, then inputs. Example, a vision transformer: 1 class token of 768 and 196
// patches make samples of 197 x 768; the token's gradient is a sum over the batch.
void SubmitConcat(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const std::int64_t all = call.spec->rows * call.spec->in;  // elements of a sample
  const gpu::Array whole = is_backward ? ArrayOf(call.output_grads[0]) : ArrayOf(call.outputs[0]);
  std::int64_t at = 0;  // of the part in a sample
  for (std::size_t i = 0; i < call.params.size(); ++i) {
    const std::int64_t n = call.params[i].elements;
    if (!is_backward) {
      CopySamples(context, call.batch, n, {ArrayOf(call.params[i]), 0, 0}, {whole, at, all});
    } else if (Wants(call.param_grads, i)) {
      SumRows(context, {.x = whole, .rows = call.batch, .columns = n, .first = at, .stride = all},
              ArrayOf(call.param_grads[i].view), call.param_grads[i].accumulate, nullptr);
    }
    at += n;
  }
  if (!is_backward) {
    for (const ConstView& input : call.inputs) {
      const std::int64_t n = input.elements / call.batch;
      CopySamples(context, call.batch, n, {ArrayOf(input), 0, n}, {whole, at, all});
      at += n;
    }
    return;
  }
  for (const View& dx : call.input_grads) {
    const std::int64_t n = call.input_grads.size() == 1 ? all - at : dx.elements / call.batch;
    if (dx.data != nullptr) {
      CopySamples(context, call.batch, n, {whole, at, all}, {ArrayOf(dx), 0, n});
    }
    at += n;
  }
}

// Takes the first rows of each sample, such as the class token; other rows get gradient 0.
void SubmitSelect(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const std::int64_t n = call.spec->rows * call.spec->in;
  if (!is_backward) {
    CopySamples(context, call.batch, n,
                {ArrayOf(call.inputs[0]), 0, call.inputs[0].elements / call.batch},
                {ArrayOf(call.outputs[0]), 0, n});
    return;
  }
  const View& dx = call.input_grads[0];
  ZeroFill(context, dx);
  CopySamples(context, call.batch, n, {ArrayOf(call.output_grads[0]), 0, n},
              {ArrayOf(dx), 0, dx.elements / call.batch});
}

}  // namespace

void SubmitElementwise(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  switch (call.spec->kind) {
    case OpKind::kActivation:
      return SubmitActivation(call, is_backward, context);
    case OpKind::kGatedActivation:
      return SubmitGated(call, is_backward, context);
    case OpKind::kAdd:
      return SubmitAdd(call, is_backward, context);
    case OpKind::kMul:
      return SubmitMul(call, is_backward, context);
    case OpKind::kScale:
      return SubmitScale(call, is_backward, context);
    case OpKind::kDropout:
      return SubmitDropout(call, is_backward, context);
    case OpKind::kConcat:
      return SubmitConcat(call, is_backward, context);
    default:
      return SubmitSelect(call, is_backward, context);
  }
}

}  // namespace shardwright::ops
