// Linear layers, embeddings, norms, losses.
//
// The three products of a linear layer with `rows` tokens, W being (out, in):
//
//                         m      n      k      example: 8 rows, 512 in, 1,024 out
//   y = x W^T             rows   out    in     8 x 1,024 x 512
//   dx = dy W             rows   in     out    8 x 512 x 1,024
//   dW = dy^T x           out    in     rows   1,024 x 512 x 8
//
// Each costs 2 m n k operations, so backward costs twice as much as forward. With `transposed` the
// weight is (in, out), as GPT-2's Conv1D has it, and operands change places. No matrix is ever
// transposed in memory but copies in fp8: strides say how it lies.

#include <cstdint>
#include <span>

#include "executor/cuda/kernels/embedding.h"
#include "executor/cuda/kernels/loss.h"
#include "executor/cuda/kernels/norm.h"
#include "executor/cuda/ops/launch.h"

namespace shardwright::ops {
namespace {

gpu::Matrix RowMajor(const gpu::Array& array, std::int64_t columns) {
  return {array, columns, 1};
}
gpu::Matrix Transposed(const gpu::Array& array, std::int64_t columns) {
  return {array, 1, columns};
}

// The product, and GELU with it: in the library's epilogue, else behind the product in a pass of
// its own.
// Forward keeps the input of GELU for backward: gelu_input is written beside y. Backward multiplies
// dx by GELU's derivative there. Without the library's epilogue that is one more pass: read two,
// write one.
void MultiplyWithGelu(const OpContext& context, const gpu::GemmArgs& product, gpu::GemmGelu gelu,
                      const View& gelu_input, std::span<std::byte> workspace) {
  gpu::GemmArgs fused = product;
  fused.gelu = gelu;
  fused.gelu_input = ArrayOf(gelu_input);
  if (MultiplyByLibrary(context, fused, workspace)) {
    return;
  }
  gpu::GemmArgs plain = product;
  gpu::MapArgs pass{.op = gpu::MapOp::kActivate,
                    .activation = Activation::kGeluTanh,
                    .n = gelu_input.elements,
                    .a = fused.gelu_input,
                    .z = product.c.array};
  if (gelu == gpu::GemmGelu::kApply) {
    plain.c.array = fused.gelu_input;
  } else {
    pass.op = gpu::MapOp::kActivateGrad;
    pass.b = product.c.array;
  }
  Multiply(context, plain, workspace);
  Map(context, pass);
}

// dx. A second input says that a GELU lies before this layer and its derivative belongs to dx.
void LinearDataGrad(const ModelOpCall& call, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const gpu::Array weight = ArrayOf(call.params[0]);
  gpu::GemmArgs product{
      .m = RowsOf(call),
      .n = spec.in,
      .k = spec.out,
      .a = RowMajor(ArrayOf(call.output_grads[0]), spec.out),
      .b = spec.transposed ? Transposed(weight, spec.out) : RowMajor(weight, spec.in),
      .c = RowMajor(ArrayOf(call.input_grads[0]), spec.in),
      .adds = call.adds_input_grads};
  const std::span<std::byte> workspace =
      RoundOperands(call, context, {.a = GradientFormat(call.options->fp8)}, product);
  if (call.inputs.size() == 1) {
    return Multiply(context, product, workspace);
  }
  const ConstView& input = call.inputs[1];
  const View gelu_input{const_cast<void*>(input.data), input.dtype, input.elements};
  MultiplyWithGelu(context, product, gpu::GemmGelu::kDerivative, gelu_input, workspace);
}

// dx, dW, then the bias's gradient: beside dW where the library can do so, else by SumRows.
void LinearBackward(const ModelOpCall& call, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const gpu::Array dy = ArrayOf(call.output_grads[0]);
  if (Wants(call.input_grads, 0)) {
    LinearDataGrad(call, context);
  }
  const bool sums = Wants(call.param_grads, 1);
  if (Wants(call.param_grads, 0)) {
    const ParamGrad& dw = call.param_grads[0];
    const gpu::Array x = ArrayOf(call.inputs[0]);
    const std::int64_t m = spec.transposed ? spec.in : spec.out;
    const std::int64_t n = spec.transposed ? spec.out : spec.in;
    gpu::GemmArgs product{.m = m,
                          .n = n,
                          .k = rows,
                          .a = Transposed(spec.transposed ? x : dy, m),
                          .b = RowMajor(spec.transposed ? dy : x, n),
                          .c = RowMajor(ArrayOf(dw.view), n),
                          .adds = dw.accumulate};
    const Fp8Format gradient = GradientFormat(call.options->fp8);
    const std::span<std::byte> workspace = RoundOperands(
        call, context, spec.transposed ? Fp8Formats{.b = gradient} : Fp8Formats{.a = gradient},
        product);
    // The bias's gradient beside it, where the library does that; it cannot add to one.
    if (sums && !call.param_grads[1].accumulate) {
      gpu::GemmArgs both = product;
      (spec.transposed ? both.column_sums : both.row_sums) = ArrayOf(call.param_grads[1].view);
      if (MultiplyByLibrary(context, both, workspace)) {
        return;
      }
    }
    Multiply(context, product, workspace);
  }
  if (sums) {
    Scratch scratch(call.workspace);
    SumRows(context, {.x = dy, .rows = rows, .columns = spec.out, .stride = spec.out},
            ArrayOf(call.param_grads[1].view), call.param_grads[1].accumulate,
            scratch.Take<float>(SumChunks(rows) * spec.out));
  }
}

}  // namespace

// Operands in fp8 are replaced by copies first (ops/fp8.cc); with chunks of the loss the layer and
// its loss run together (linear_loss.cc).
void SubmitLinear(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  if (call.loss_spec != nullptr) {
    return SubmitLinearLoss(call, context);
  }
  if (is_backward) {
    return LinearBackward(call, context);
  }
  const OpSpec& spec = *call.spec;
  const gpu::Array weight = ArrayOf(call.params[0]);
  gpu::GemmArgs product{
      .m = RowsOf(call),
      .n = spec.out,
      .k = spec.in,
      .a = RowMajor(ArrayOf(call.inputs[0]), spec.in),
      .b = spec.transposed ? RowMajor(weight, spec.out) : Transposed(weight, spec.in),
      .c = RowMajor(ArrayOf(call.outputs.back()), spec.out),
      .bias = spec.has_bias ? ArrayOf(call.params[1]) : gpu::Array{}};
  const std::span<std::byte> workspace = RoundOperands(call, context, {}, product);
  if (call.outputs.size() == 1) {
    return Multiply(context, product, workspace);
  }
  MultiplyWithGelu(context, product, gpu::GemmGelu::kApply, call.outputs.front(), workspace);
}

// Backward writes the rows of the table that occur in the batch, and zeros elsewhere unless it adds
// to a gradient. `copies`: a gradient of several arrays, which are summed on the way.
void SubmitEmbedding(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const auto* const ids = static_cast<const std::int64_t*>(call.inputs[0].data);
  if (!is_backward) {
    LaunchBlocks<gpu::EmbeddingKernel>(context, rows,
                                       {.ids = ids,
                                        .rows = rows,
                                        .features = spec.out,
                                        .vocab = spec.vocab,
                                        .index_offset = spec.index_offset,
                                        .table = ArrayOf(call.params[0]),
                                        .y = ArrayOf(call.outputs[0]),
                                        .fault = context.fault});
    return;
  }
  if (!Wants(call.param_grads, 0)) {
    return;
  }
  const ParamGrad& grad = call.param_grads[0];
  const ConstView& dy = call.output_grads[0];
  Scratch scratch(call.workspace);
  auto* const next = scratch.Take<std::int64_t>(rows);
  auto* const tails = scratch.Take<std::int64_t>(rows);
  context.gpu.Fill(tails, 0, rows * static_cast<std::int64_t>(sizeof(std::int64_t)),
                   context.stream);
  if (!grad.accumulate) {
    ZeroFill(context, grad.view);
  }
  LaunchItems<gpu::EmbeddingLinksKernel>(
      context, rows, {.ids = ids, .rows = rows, .next = next, .tails = tails},
      gpu::SharedSize<std::int64_t>(gpu::EmbeddingLinksKernel::kTile + gpu::kVector));
  LaunchBlocks<gpu::EmbeddingGradKernel>(context, rows,
                                         {.ids = ids,
                                          .next = next,
                                          .tails = tails,
                                          .rows = rows,
                                          .features = spec.out,
                                          .vocab = spec.vocab,
                                          .index_offset = spec.index_offset,
                                          .copies = dy.elements / (rows * spec.out),
                                          .padding_row = spec.padding_row,
                                          .dy = ArrayOf(dy),
                                          .grad = ArrayOf(grad.view),
                                          .adds = grad.accumulate});
}

// Saved for backward: the inverse deviation of each row, and for layer norm its mean, 4 bytes each.
// Two inputs are a fused residual: the sum of both is an output as well.
void SubmitNorm(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = RowsOf(call);
  const bool has_mean = spec.kind == OpKind::kLayerNorm;
  auto* const inverses = reinterpret_cast<float*>(call.saved.data());
  float* const means = has_mean ? inverses + rows : nullptr;
  const gpu::Array x = ArrayOf(call.inputs[0]);
  const std::int64_t stride = call.inputs[0].elements / rows;
  const auto weight_offset = static_cast<float>(spec.weight_offset);
  if (!is_backward) {
    const bool sums = call.inputs.size() == 2;
    LaunchBlocks<gpu::RowNormKernel>(
        context, rows,
        {.x = x,
         .y = ArrayOf(call.outputs[0]),
         .weight = ArrayOf(call.params[0]),
         .bias = spec.has_bias ? ArrayOf(call.params[1]) : gpu::Array{},
         .addend = sums ? ArrayOf(call.inputs[1]) : gpu::Array{},
         .sum = sums ? ArrayOf(call.outputs[1]) : gpu::Array{},
         .n = spec.in,
         .stride = stride,
         .weight_offset = weight_offset,
         .epsilon = static_cast<float>(spec.epsilon),
         .has_mean = has_mean,
         .inverses = inverses,
         .means = means});
    return;
  }
  const gpu::Array dy = ArrayOf(call.output_grads[0]);
  if (Wants(call.input_grads, 0)) {
    if (stride > spec.in) {
      ZeroFill(context, call.input_grads[0]);
    }
    LaunchBlocks<gpu::RowNormGradKernel>(context, rows,
                                         {.x = x,
                                          .dy = dy,
                                          .dx = ArrayOf(call.input_grads[0]),
                                          .weight = ArrayOf(call.params[0]),
                                          .n = spec.in,
                                          .stride = stride,
                                          .weight_offset = weight_offset,
                                          .inverses = inverses,
                                          .means = means,
                                          .adds = call.adds_input_grads});
  }
  for (std::size_t i = 0; i < call.param_grads.size(); ++i) {
    if (!Wants(call.param_grads, i)) {
      continue;
    }
    Scratch scratch(call.workspace);
    RowSum sum{.x = dy, .rows = rows, .columns = spec.in, .stride = spec.in};
    if (i == 0) {
      sum.y = x;
      sum.y_stride = stride;
      sum.means = means;
      sum.inverses = inverses;
    }
    SumRows(context, sum, ArrayOf(call.param_grads[i].view), call.param_grads[i].accumulate,
            scratch.Take<float>(SumChunks(rows) * spec.in));
  }
}

namespace {

// No log-sums are kept: backward has the result y itself.
void SubmitLogSoftmax(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  const std::int64_t n = call.spec->in;
  if (!is_backward) {
    LaunchBlocks<gpu::LogSoftmaxKernel>(
        context, RowsOf(call),
        {.x = ArrayOf(call.inputs[0]), .y = ArrayOf(call.outputs[0]), .n = n});
    return;
  }
  LaunchBlocks<gpu::LogSoftmaxGradKernel>(context, RowsOf(call),
                                          {.y = ArrayOf(call.outputs[0]),
                                           .dy = ArrayOf(call.output_grads[0]),
                                           .dx = ArrayOf(call.input_grads[0]),
                                           .n = n});
}

}  // namespace

// Backward counts the labels again instead of keeping their number: 8 bytes a row, small beside
// logits.
void SubmitLoss(const ModelOpCall& call, bool is_backward, const OpContext& context) {
  if (call.spec->kind == OpKind::kLogSoftmax) {
    return SubmitLogSoftmax(call, is_backward, context);
  }
  const bool has_log_sums = call.spec->kind == OpKind::kCrossEntropy;
  Scratch scratch(call.workspace);
  gpu::LossArgs args;
  args.x = ArrayOf(call.inputs[0]);
  args.labels = static_cast<const std::int64_t*>(call.inputs[1].data);
  args.rows = RowsOf(call);
  args.n = call.spec->in;
  args.is_mean = call.reduction == LossReduction::kMean;
  args.scale = call.loss_scale;
  args.partial_count = CeilDiv(args.rows, kLossRows);
  args.partial = scratch.Take<double>(2 * args.partial_count);
  args.factor = scratch.Take<double>(1);
  args.fault = context.fault;
  auto* const log_sums = has_log_sums ? reinterpret_cast<float*>(call.saved.data()) : nullptr;
  args.log_sums = log_sums;
  if (!is_backward) {
    args.loss = static_cast<float*>(call.outputs[0].data);
    if (has_log_sums) {
      LaunchBlocks<gpu::LogSumExpKernel>(context, args.rows,
                                         {.x = args.x, .n = args.n, .log_sums = log_sums});
    }
  }
  LaunchBlocks<gpu::LossRowsKernel, double>(context, args.partial_count, args);
  LaunchBlocks<gpu::LossSumKernel>(context, 1, args);
  if (is_backward) {
    args.dx = ArrayOf(call.input_grads[0]);
    LaunchBlocks<gpu::LossGradKernel>(context, args.rows, args);
  }
}

}  // namespace shardwright::ops

namespace shardwright {

std::int64_t LossRowsOf(const ModelOpCall& call) {
  return RowsOf(call);
}

void SubmitLabelCount(const ModelOpCall& call, std::uint8_t* verdicts, gpu::LabelCounts* counts,
                      const OpContext& context) {
  const gpu::LabelArgs args{.x = ops::ArrayOf(call.inputs[0]),
                            .labels = static_cast<const std::int64_t*>(call.inputs[1].data),
                            .rows = LossRowsOf(call),
                            .n = call.spec->in,
                            .verdicts = verdicts,
                            .counts = counts};
  ops::LaunchBlocks<gpu::LabelRowsKernel, gpu::LargestScore>(context, args.rows, args);
  ops::LaunchBlocks<gpu::LabelCountKernel, std::int64_t>(context, 1, args);
}

}  // namespace shardwright
