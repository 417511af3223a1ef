// Log-softmax, negative log-likelihood, and both in one as cross-entropy. A loss reads the logits
// row by row and never writes an fp32 copy of them.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "core/error.h"
#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

// The largest number of one row, and the sum of exp(x - largest), in two passes of chunks.
struct ExpSum {
  float largest = -INFINITY;
  double sum = 0.0;
  [[nodiscard]] float Log() const { return largest + static_cast<float>(std::log(sum)); }
};
ExpSum SumExp(const ConstView& x, std::int64_t offset, std::int64_t n) {
  ChunkBuffer buffer;
  float largest = -INFINITY;
  ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
    const float* const values = ReadFloats(x, offset + begin, count, buffer.values.data());
    largest = std::fmax(largest, VectorMax(values, count));
  });
  double sum = 0.0;
  ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
    const float* const values = ReadFloats(x, offset + begin, count, buffer.values.data());
    sum += VectorExp(values, largest, buffer.values.data(), count);
  });
  return {largest, sum};
}

SHARDWRIGHT_CLONES void Subtract(const float* x, float y, float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    z[i] = x[i] - y;
  }
}

std::int64_t LabelOf(const ModelOpCall& call, std::int64_t row) {
  const std::int64_t label = static_cast<const std::int64_t*>(call.inputs[1].data)[row];
  const std::int64_t all = call.spec->in * std::max<std::int64_t>(call.spec->tensor_ranks, 1);
  if (label >= all) {
    throw InputError("the data", "a label " + std::to_string(label),
                     "less than the number of classes, " + std::to_string(all));
  }
  return label;
}

// The label among this rank's words; below 0 or `spec->in` at least: it is not there.
std::int64_t LabelHere(const ModelOpCall& call, std::int64_t row) {
  const std::int64_t label = LabelOf(call, row);
  return label < 0 || call.spec->tensor_ranks == 0 ? label : label - call.cut.part * call.spec->in;
}

// Calls f(row) for every row; threads share them.
template <class F>
void ForEachRow(const ModelOpCall& call, const F& f) {
  ForEachPart(call.team, RowsOf(call), LeastRows(call.spec->in),
              [&](std::int64_t first, std::int64_t last, std::size_t) {
                for (std::int64_t row = first; row < last; ++row) {
                  f(row);
                }
              });
}

std::int64_t CountLabels(const ModelOpCall& call) {
  std::int64_t count = 0;
  for (std::int64_t row = 0; row < RowsOf(call); ++row) {
    count += LabelOf(call, row) >= 0 ? 1 : 0;
  }
  return count;
}

// What a row's share of the loss is multiplied by. A mean over no labels is 0 / 0, as in PyTorch.
double RowFactor(const ModelOpCall& call) {
  return call.reduction == LossReduction::kSum ? 1.0 : 1.0 / static_cast<double>(CountLabels(call));
}

void StoreLoss(const ModelOpCall& call, double sum) {
  *static_cast<float*>(call.outputs[0].data) = static_cast<float>(sum * RowFactor(call));
}

}  // namespace

void LogSoftmaxForward(const ModelOpCall& call) {
  const std::int64_t n = call.spec->in;
  ForEachRow(call, [&](std::int64_t row) {
    const float log_sum = SumExp(call.inputs[0], row * n, n).Log();
    ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
      ChunkBuffer buffer;
      const std::int64_t offset = row * n + begin;
      Subtract(ReadFloats(call.inputs[0], offset, count, buffer.values.data()), log_sum,
               buffer.values.data(), count);
      StoreFloats(buffer.values.data(), count, call.outputs[0], offset);
    });
  });
}

// dx = dy - exp(y) * sum(dy).
void LogSoftmaxBackward(const ModelOpCall& call) {
  const std::int64_t n = call.spec->in;
  const ConstView y = AsConst(call.outputs[0]);
  const ConstView& dy = call.output_grads[0];
  ForEachRow(call, [&](std::int64_t row) {
    float sum = 0.0F;
    ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
      ChunkBuffer buffer;
      sum += VectorSum(ReadFloats(dy, row * n + begin, count, buffer.values.data()), count);
    });
    ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
      ChunkBuffer total;
      ChunkBuffer buffer;
      const std::int64_t offset = row * n + begin;
      VectorExp(ReadFloats(y, offset, count, buffer.values.data()), 0.0F, total.values.data(),
                count);
      VectorScale(-sum, total.values.data(), total.values.data(), count);
      VectorAdd(1.0F, ReadFloats(dy, offset, count, buffer.values.data()), total.values.data(),
                count);
      StoreFloats(total.values.data(), count, call.input_grads[0], offset);
    });
  });
}

void NllLossForward(const ModelOpCall& call) {
  double sum = 0.0;
  for (std::int64_t row = 0; row < RowsOf(call); ++row) {
    const std::int64_t label = LabelOf(call, row);
    if (label >= 0) {
      sum -= ReadOne(call.inputs[0], row * call.spec->in + label);
    }
  }
  StoreLoss(call, sum);
}

void NllLossBackward(const ModelOpCall& call) {
  const std::int64_t n = call.spec->in;
  const View& dx = call.input_grads[0];
  const auto factor = static_cast<float>(-call.loss_scale * RowFactor(call));
  ZeroFill(dx);
  for (std::int64_t row = 0; row < RowsOf(call); ++row) {
    const std::int64_t label = LabelOf(call, row);
    if (label >= 0) {
      StoreFloats(&factor, 1, dx, row * n + label);
    }
  }
}

namespace {

// Of this rank's words in a row: largest logit, sum of exponentials, the label's logit. 0: none.
void ShareRow(const ModelOpCall& call, std::int64_t row) {
  const std::int64_t n = call.spec->in;
  const ExpSum here = SumExp(call.inputs[0], row * n, n);
  const std::int64_t label = LabelHere(call, row);
  float* const numbers = reinterpret_cast<float*>(call.exchange.data()) + 3 * row;
  numbers[0] = here.largest;
  numbers[1] = static_cast<float>(here.sum);
  numbers[2] = label >= 0 && label < n ? ReadOne(call.inputs[0], row * n + label) : 0.0F;
}

// The log-sum of all ranks' words in a row, and the label's logit.
std::pair<float, float> MergeRow(const ModelOpCall& call, std::int64_t row) {
  const auto* const numbers = reinterpret_cast<const float*>(call.exchange.data()) + 3 * row;
  ExpSum all;
  float logit = 0.0F;
  const auto of_rank = [&](std::int64_t rank) { return numbers + 3 * RowsOf(call) * rank; };
  for (std::int64_t rank = 0; rank < call.spec->tensor_ranks; ++rank) {
    all.largest = std::fmax(all.largest, of_rank(rank)[0]);
  }
  for (std::int64_t rank = 0; rank < call.spec->tensor_ranks; ++rank) {
    all.sum += of_rank(rank)[1] * std::exp(static_cast<double>(of_rank(rank)[0] - all.largest));
    logit += of_rank(rank)[2];
  }
  return {all.Log(), logit};
}

}  // namespace

// Keeps the log-sum of each row.
void CrossEntropyForward(const ModelOpCall& call) {
  if (call.part == OpPart::kBeforeExchange) {
    return ForEachRow(call, [&](std::int64_t row) { ShareRow(call, row); });
  }
  const std::int64_t n = call.spec->in;
  auto* const log_sums = reinterpret_cast<float*>(call.saved.data());
  double sum = 0.0;
  if (call.part == OpPart::kWhole) {
    ForEachRow(call,
               [&](std::int64_t row) { log_sums[row] = SumExp(call.inputs[0], row * n, n).Log(); });
  }
  for (std::int64_t row = 0; row < RowsOf(call); ++row) {
    const std::int64_t label = LabelOf(call, row);
    float logit = 0.0F;
    if (call.part == OpPart::kAfterExchange) {
      std::tie(log_sums[row], logit) = MergeRow(call, row);
    } else if (label >= 0) {
      logit = ReadOne(call.inputs[0], row * n + label);
    }
    sum += label >= 0 ? static_cast<double>(log_sums[row]) - logit : 0.0;
  }
  StoreLoss(call, sum);
}

// dx = (softmax(x) - onehot) * factor.
void CrossEntropyBackward(const ModelOpCall& call) {
  const std::int64_t n = call.spec->in;
  const auto* const log_sums = reinterpret_cast<const float*>(call.saved.data());
  const auto factor = static_cast<float>(call.loss_scale * RowFactor(call));
  ForEachRow(call, [&](std::int64_t row) {
    const std::int64_t label = LabelHere(call, row);
    const float scale = LabelOf(call, row) < 0 ? 0.0F : factor;
    ForEachChunk(n, [&](std::int64_t begin, std::int64_t count) {
      ChunkBuffer buffer;
      const std::int64_t offset = row * n + begin;
      float* const values = buffer.values.data();
      VectorExp(ReadFloats(call.inputs[0], offset, count, values), log_sums[row], values, count);
      if (label >= begin && label < begin + count) {
        values[label - begin] -= 1.0F;
      }
      VectorScale(scale, values, values, count);
      StoreFloats(values, count, call.input_grads[0], offset);
    });
  });
}

}  // namespace shardwright
