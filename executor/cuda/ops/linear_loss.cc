// A linear layer and the cross-entropy behind it, both ways, for one chunk of rows after the other:
// logits of the chunk alone exist, and their gradient overwrites them.
//
// Example: 8,192 rows, 8 chunks, a vocabulary of 128,256. Logits of all rows would be 2.0 GiB in
// bf16; of a chunk of 1,024 rows they are 250 MiB. Each chunk runs the product, log-sums, losses,
// the gradient of the logits in place, and both backward products. Weight gradients of later chunks
// are added.
//
// The factor 1 / labels has to be known before the first chunk's gradient, so labels are counted
// first.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "executor/cuda/kernels/loss.h"
#include "executor/cuda/ops/launch.h"

namespace shardwright::ops {
namespace {

// Column 0 of row `first`.
ConstView FromRow(const ConstView& view, std::int64_t first, std::int64_t columns) {
  return {static_cast<const std::byte*>(view.data) + first * columns * SizeOf(view.dtype),
          view.dtype, view.elements - first * columns};
}
View FromRow(const View& view, std::int64_t first, std::int64_t columns) {
  return {static_cast<std::byte*>(view.data) + first * columns * SizeOf(view.dtype), view.dtype,
          view.elements - first * columns};
}

// The loss of the chunk's rows, in `partial`, and the gradient of its logits over them.
void SubmitChunkLoss(gpu::LossArgs args, float* log_sums, const OpContext& context) {
  LaunchBlocks<gpu::LogSumExpKernel>(context, args.rows,
                                     {.x = args.x, .n = args.n, .log_sums = log_sums});
  args.log_sums = log_sums;
  LaunchBlocks<gpu::LossRowsKernel, double>(context, args.partial_count, args);
  args.dx = args.x;
  LaunchBlocks<gpu::LossGradKernel>(context, args.rows, args);
}

}  // namespace

void SubmitLinearLoss(const ModelOpCall& call, const OpContext& context) {
  const std::int64_t rows = RowsOf(call);
  const std::int64_t chunk = LossChunkRows(rows, call.options->loss_chunks);
  const std::int64_t out = call.spec->out;
  Scratch scratch(call.workspace);
  const View logits{scratch.Take<std::byte>(chunk * out * SizeOf(call.compute)), call.compute,
                    chunk * out};
  auto* const log_sums = scratch.Take<float>(chunk);
  const std::int64_t blocks = LossChunkBlocks(rows, chunk);
  gpu::LossArgs all;
  all.labels = static_cast<const std::int64_t*>(call.inputs[1].data);
  all.rows = rows;
  all.n = call.loss_spec->in;
  all.is_mean = call.reduction == LossReduction::kMean;
  all.scale = call.loss_scale;
  all.partial_count = CeilDiv(rows, kLossRows);
  all.partial = scratch.Take<double>(2 * blocks);
  all.factor = scratch.Take<double>(1);
  all.fault = context.fault;
  // Without a loss these only count the labels, which the first chunk's gradient needs.
  LaunchBlocks<gpu::LossRowsKernel, double>(context, all.partial_count, all);
  LaunchBlocks<gpu::LossSumKernel>(context, 1, all);

  all.loss = static_cast<float*>(call.outputs[0].data);
  OpSpec spec = *call.spec;
  ModelOpCall linear = call;
  linear.spec = &spec;
  linear.loss_spec = nullptr;
  linear.batch = 1;
  linear.workspace = scratch.Rest();
  linear.outputs = {logits};
  linear.output_grads = {{logits.data, logits.dtype, logits.elements}};
  gpu::LossArgs part = all;
  part.x = ArrayOf(logits);
  for (std::int64_t first = 0; first < rows; first += chunk) {
    spec.rows = part.rows = std::min(chunk, rows - first);
    part.labels = all.labels + first;
    part.partial_count = CeilDiv(part.rows, kLossRows);
    linear.inputs = {FromRow(call.inputs[0], first, spec.in)};
    linear.input_grads = {FromRow(call.input_grads[0], first, spec.in)};
    SubmitLinear(linear, false, context);
    SubmitChunkLoss(part, log_sums, context);
    SubmitLinear(linear, true, context);
    part.partial += 2 * part.partial_count;
    for (ParamGrad& grad : linear.param_grads) {
      grad.accumulate = true;
    }
  }
  all.partial_count = blocks;
  LaunchBlocks<gpu::LossSumKernel>(context, 1, all);
}

}  // namespace shardwright::ops
