// Layer norm and RMS norm over rows of features, with statistics in fp32.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

struct Statistics {
  float mean = 0.0F;  // 0 for an RMS norm
  float inverse = 0.0F;
};

// What multiplies and is added to each feature; no bias: null.
struct Affine {
  const float* weight;
  const float* bias;
};

SHARDWRIGHT_CLONES void Normalize(const float* x, Statistics s, const Affine& affine, float* y,
                                  std::int64_t n) {
  const float* const weight = affine.weight;
  const float* const bias = affine.bias;
  if (bias == nullptr) {
    for (std::int64_t i = 0; i < n; ++i) {
      y[i] = (x[i] - s.mean) * s.inverse * weight[i];
    }
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = (x[i] - s.mean) * s.inverse * weight[i] + bias[i];
  }
}

// The scratch of a backward pass; rows of features.
struct BackwardRows {
  const float* weight;
  float* weight_sum;  // gradients of the parameters so far
  float* bias_sum;
  float* normalized;  // of the row at hand
  float* scaled;      // its gradient times the weight
};

// In two loops: compilers give up on one with as many pointers that could overlap.
SHARDWRIGHT_CLONES void SplitGradient(const float* x, const float* dy, Statistics s,
                                      const BackwardRows& rows, std::int64_t n) {
  const float* const weight = rows.weight;
  float* const normalized = rows.normalized;
  float* const scaled = rows.scaled;
  for (std::int64_t i = 0; i < n; ++i) {
    normalized[i] = (x[i] - s.mean) * s.inverse;
    scaled[i] = dy[i] * weight[i];
  }
}

SHARDWRIGHT_CLONES void AddParamGrads(const float* dy, const BackwardRows& rows, std::int64_t n) {
  const float* const normalized = rows.normalized;
  float* const weight_sum = rows.weight_sum;
  float* const bias_sum = rows.bias_sum;
  for (std::int64_t i = 0; i < n; ++i) {
    weight_sum[i] += dy[i] * normalized[i];
    bias_sum[i] += dy[i];
  }
}

// dx = inverse * (scaled - means.scaled - normalized * means.product).
struct Means {
  float scaled;
  float product;
};
SHARDWRIGHT_CLONES void InputGradient(const BackwardRows& rows, float inverse, Means means,
                                      float* dx, std::int64_t n) {
  const float* const normalized = rows.normalized;
  const float* const scaled = rows.scaled;
  for (std::int64_t i = 0; i < n; ++i) {
    dx[i] = inverse * (scaled[i] - means.scaled - normalized[i] * means.product);
  }
}

// The norm's weight as it multiplies: Gemma stores it minus one. Ones where backward wants no
// gradient of the input and so gets no weight.
const float* ReadWeight(const ModelOpCall& call, Scratch& scratch) {
  const OpSpec& spec = *call.spec;
  float* const values = scratch.Floats(spec.in);
  if (call.params[0].data == nullptr) {
    std::fill_n(values, spec.in, 1.0F);
    return values;
  }
  LoadFloats(call.params[0], 0, spec.in, values);
  const auto offset = static_cast<float>(spec.weight_offset);
  if (offset != 0.0F) {
    for (std::int64_t i = 0; i < spec.in; ++i) {
      values[i] += offset;
    }
  }
  return values;
}

Statistics Measure(const OpSpec& spec, const float* x) {
  const auto n = static_cast<float>(spec.in);
  Statistics s;
  if (spec.kind == OpKind::kLayerNorm) {
    s.mean = VectorSum(x, spec.in) / n;
  }
  const float variance = VectorSquares(x, s.mean, spec.in) / n;
  s.inverse = 1.0F / std::sqrt(variance + static_cast<float>(spec.epsilon));
  return s;
}

// Elements from one row of the input to the next: a norm may cover the first features of longer
// rows only (the low-rank keys and values of DeepSeek).
std::int64_t RowStride(std::int64_t input_elements, std::int64_t rows) {
  return input_elements / rows;
}

// Statistics per row lie in `saved`: the inverses, and for a layer norm the means behind them.
void ForwardRows(const ModelOpCall& call, std::int64_t first, std::int64_t last,
                 std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  const std::int64_t rows = call.batch * spec.rows;
  const std::int64_t n = spec.in;
  Scratch scratch(workspace);
  const float* const weight = ReadWeight(call, scratch);
  const float* bias = nullptr;
  if (spec.has_bias) {
    bias = ReadFloats(call.params[1], 0, n, scratch.Floats(n));
  }
  float* const x_buffer = scratch.Floats(n);
  float* const y_buffer = scratch.Floats(n);
  auto* const inverses = reinterpret_cast<float*>(call.saved.data());
  const std::int64_t stride = RowStride(call.inputs[0].elements, rows);
  for (std::int64_t row = first; row < last; ++row) {
    const float* const x = ReadFloats(call.inputs[0], row * stride, n, x_buffer);
    const Statistics s = Measure(spec, x);
    inverses[row] = s.inverse;
    if (spec.kind == OpKind::kLayerNorm) {
      inverses[rows + row] = s.mean;
    }
    float* const y = ResultFloats(call.outputs[0], row * n, y_buffer);
    Normalize(x, s, {weight, bias}, y, n);
    FinishFloats(y, n, call.outputs[0], row * n);
  }
}

void Forward(const ModelOpCall& call) {
  ForEachPart(call.team, call.batch * call.spec->rows, LeastRows(call.spec->in),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                ForwardRows(call, first, last, WorkspaceOf(call, worker));
              });
}

// A backward pass over some features of some rows.
class RowGrads {
 public:
  RowGrads(const ModelOpCall& call, std::span<std::byte> workspace)
      : call_(call), scratch_(workspace) {
    const std::int64_t n = call.spec->in;
    parts_.weight = ReadWeight(call, scratch_);
    parts_.weight_sum = scratch_.Floats(n);
    parts_.bias_sum = scratch_.Floats(n);
    x_buffer_ = scratch_.Floats(n);
    dy_buffer_ = scratch_.Floats(n);
    parts_.normalized = scratch_.Floats(n);
    parts_.scaled = scratch_.Floats(n);
    std::fill_n(parts_.weight_sum, n, 0.0F);
    std::fill_n(parts_.bias_sum, n, 0.0F);
  }

  // All features of one row: its gradient, and with `sums` its share of the parameters' gradients.
  void Row(std::int64_t row, bool sums) {
    const std::int64_t n = call_.spec->in;
    const Numbers numbers = Read(row, 0, n);
    if (sums) {
      AddParamGrads(numbers.dy, parts_, n);
    }
    if (call_.input_grads[0].data == nullptr) {
      return;
    }
    const auto count = static_cast<float>(n);
    const Means means{has_mean_ ? VectorSum(parts_.scaled, n) / count : 0.0F,
                      VectorDot(parts_.scaled, parts_.normalized, n) / count};
    // dy's buffer is free again.
    float* const dx = ResultFloats(call_.input_grads[0], row * stride_, dy_buffer_);
    InputGradient(parts_, numbers.statistics.inverse, means, dx, n);
    FinishFloats(dx, n, call_.input_grads[0], row * stride_);
  }

  // Features [first, last) of all rows: the parameters' gradients.
  void Columns(std::int64_t first, std::int64_t last) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      AddParamGrads(Read(row, first, last - first).dy, parts_, last - first);
    }
    Store(first, last - first);
  }

  // The sums so far: of features [first, first + n).
  void Store(std::int64_t first, std::int64_t n) const {
    const float* const sums[] = {parts_.weight_sum, parts_.bias_sum};
    for (std::size_t i = 0; i < call_.param_grads.size(); ++i) {
      if (call_.param_grads[i].view.data != nullptr) {
        StoreParamGrad(sums[i], n, call_.param_grads[i], first);
      }
    }
  }

 private:
  struct Numbers {
    const float* dy;
    Statistics statistics;
  };
  Numbers Read(std::int64_t row, std::int64_t first, std::int64_t n) {
    const auto* const inverses = reinterpret_cast<const float*>(call_.saved.data());
    const float* const x = ReadFloats(call_.inputs[0], row * stride_ + first, n, x_buffer_);
    const std::int64_t at = row * call_.spec->in + first;
    const float* const dy = ReadFloats(call_.output_grads[0], at, n, dy_buffer_);
    const Statistics s{has_mean_ ? inverses[rows_ + row] : 0.0F, inverses[row]};
    BackwardRows parts = parts_;
    parts.weight += first;
    SplitGradient(x, dy, s, parts, n);
    return {dy, s};
  }

  const ModelOpCall& call_;
  const bool has_mean_ = call_.spec->kind == OpKind::kLayerNorm;
  const std::int64_t rows_ = call_.batch * call_.spec->rows;
  const std::int64_t stride_ = RowStride(call_.inputs[0].elements, rows_);
  Scratch scratch_;
  BackwardRows parts_{};
  float* x_buffer_ = nullptr;
  float* dy_buffer_ = nullptr;
};

// Threads share the rows, and then, since sums go row by row, the features.
void Backward(const ModelOpCall& call) {
  const std::int64_t rows = call.batch * call.spec->rows;
  const std::int64_t n = call.spec->in;
  const bool wants_input = call.input_grads[0].data != nullptr;
  if (wants_input && RowStride(call.inputs[0].elements, rows) > n) {
    ZeroFill(call.input_grads[0]);
  }
  const bool is_shared =
      call.team != nullptr && call.team->threads() > 1 && rows >= 2 * LeastRows(n);
  ForEachPart(is_shared ? call.team : nullptr, wants_input || !is_shared ? rows : 0, LeastRows(n),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                RowGrads grads(call, WorkspaceOf(call, worker));
                for (std::int64_t row = first; row < last; ++row) {
                  grads.Row(row, !is_shared);
                }
                if (!is_shared) {
                  grads.Store(0, n);
                }
              });
  if (is_shared) {
    ForEachPart(call.team, n, kLeastColumns,
                [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                  RowGrads(call, WorkspaceOf(call, worker)).Columns(first, last);
                });
  }
}

}  // namespace

void LayerNormForward(const ModelOpCall& call) {
  Forward(call);
}

void LayerNormBackward(const ModelOpCall& call) {
  Backward(call);
}

void RmsNormForward(const ModelOpCall& call) {
  Forward(call);
}

void RmsNormBackward(const ModelOpCall& call) {
  Backward(call);
}

}  // namespace shardwright
