// A linear layer and the cross-entropy behind it, both ways, for one chunk of rows after the other:
// logits of the chunk alone exist, and their gradient overwrites them.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

ConstView RowsOf(const ConstView& view, std::int64_t first, std::int64_t rows,
                 std::int64_t columns) {
  return {static_cast<const std::byte*>(view.data) + first * columns * SizeOf(view.dtype),
          view.dtype, rows * columns};
}

View RowsOf(const View& view, std::int64_t first, std::int64_t rows, std::int64_t columns) {
  return {static_cast<std::byte*>(view.data) + first * columns * SizeOf(view.dtype), view.dtype,
          rows * columns};
}

std::int64_t CountLabels(const ConstView& labels, std::int64_t rows) {
  const auto* const values = static_cast<const std::int64_t*>(labels.data);
  return rows - std::count_if(values, values + rows, [](std::int64_t label) { return label < 0; });
}

}  // namespace

void LinearLossBackward(const ModelOpCall& call) {
  const std::int64_t rows = call.batch * call.spec->rows;
  const std::int64_t chunk = LossChunkRows(rows, call.options->loss_chunks);
  const std::int64_t in = call.spec->in;
  const std::int64_t out = call.spec->out;
  Scratch scratch(call.workspace);
  void* const logits = scratch.Take(chunk * out * SizeOf(call.compute)).data();
  const std::span<std::byte> log_sums = scratch.Take(chunk * 4);
  const double factor = call.reduction == LossReduction::kSum
                            ? 1.0
                            : 1.0 / static_cast<double>(CountLabels(call.inputs[1], rows));
  OpSpec linear_spec = *call.spec;
  OpSpec loss_spec = *call.loss_spec;
  ModelOpCall linear = call;
  linear.spec = &linear_spec;
  linear.loss_spec = nullptr;
  linear.batch = 1;
  linear.workspace = scratch.Rest();
  ModelOpCall loss = linear;
  loss.spec = &loss_spec;
  loss.params.clear();
  loss.param_grads.clear();
  loss.saved = log_sums;
  loss.reduction = LossReduction::kSum;
  loss.loss_scale = call.loss_scale * factor;
  float chunk_loss = 0.0F;
  loss.outputs = {{&chunk_loss, DType::kFp32, 1}};
  double sum = 0.0;
  for (std::int64_t first = 0; first < rows; first += chunk) {
    const std::int64_t count = std::min(chunk, rows - first);
    linear_spec.rows = loss_spec.rows = count;
    const View part{logits, call.compute, count * out};
    linear.inputs = {RowsOf(call.inputs[0], first, count, in)};
    linear.outputs = {part};
    LinearForward(linear);
    loss.inputs = {AsConst(part), RowsOf(call.inputs[1], first, count, 1)};
    loss.input_grads = {part};
    CrossEntropyForward(loss);
    sum += static_cast<double>(chunk_loss);
    CrossEntropyBackward(loss);
    linear.output_grads = {AsConst(part)};
    linear.input_grads = {RowsOf(call.input_grads[0], first, count, in)};
    LinearBackward(linear);
    for (ParamGrad& grad : linear.param_grads) {
      grad.accumulate = true;
    }
  }
  *static_cast<float*>(call.outputs[0].data) = static_cast<float>(sum * factor);
}

}  // namespace shardwright
