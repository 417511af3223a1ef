// Element-wise ops: activations, sums, products, scaling.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "executor/op_layout.h"

namespace shardwright {
namespace {

SHARDWRIGHT_CLONES void Sum(const float* x, const float* y, float* z, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    z[i] = x[i] + y[i];
  }
}

// z = f(x) over whole tensors, f(const float* x, float* z, n) on chunks.
template <class F>
void MapOne(Team* team, const ConstView& x, const View& z, const F& f) {
  ForEachChunk(team, z.elements, [&](std::int64_t begin, std::int64_t count) {
    ChunkBuffer x_buffer;
    ChunkBuffer z_buffer;
    float* const result = ResultFloats(z, begin, z_buffer.values.data());
    f(ReadFloats(x, begin, count, x_buffer.values.data()), result, count);
    FinishFloats(result, count, z, begin);
  });
}

// z = f(x, y), where y may have fewer elements: it then stands for itself repeated (what all
// samples share).
template <class F>
void MapTwo(Team* team, const ConstView& x, const ConstView& y, const View& z, const F& f) {
  for (std::int64_t start = 0; start < z.elements; start += y.elements) {
    ForEachChunk(team, y.elements, [&](std::int64_t begin, std::int64_t count) {
      ChunkBuffer x_buffer;
      ChunkBuffer y_buffer;
      ChunkBuffer z_buffer;
      float* const result = ResultFloats(z, start + begin, z_buffer.values.data());
      f(ReadFloats(x, start + begin, count, x_buffer.values.data()),
        ReadFloats(y, begin, count, y_buffer.values.data()), result, count);
      FinishFloats(result, count, z, start + begin);
    });
  }
}

void Copy(Team* team, const ConstView& x, const View& z) {
  MapOne(team, x, z,
         [](const float* from, float* to, std::int64_t n) { std::copy_n(from, n, to); });
}

// z[channel] = x[channel] * factor(channel) over planes of spec.rows elements.
template <class F>
void MapPlanes(const ModelOpCall& call, const F& f) {
  const std::int64_t plane = call.spec->rows;
  ForEachRowChunk(call.team, call.batch * call.spec->in, plane,
                  [&](std::int64_t channel, std::int64_t begin, std::int64_t count) {
                    f(channel, channel * plane + begin, count);
                  });
}

void ChannelScaleGrad(const ModelOpCall& call) {
  const ConstView& dz = call.output_grads[0];
  const View& dx = call.input_grads[0];
  const View& dfactor = call.input_grads[1];
  const std::int64_t plane = call.spec->rows;
  if (dx.data != nullptr) {
    MapPlanes(call, [&](std::int64_t channel, std::int64_t begin, std::int64_t count) {
      ChunkBuffer in;
      ChunkBuffer out;
      float* const result = ResultFloats(dx, begin, out.values.data());
      VectorScale(ReadOne(call.inputs[1], channel), ReadFloats(dz, begin, count, in.values.data()),
                  result, count);
      FinishFloats(result, count, dx, begin);
    });
  }
  if (dfactor.data == nullptr) {
    return;
  }
  for (std::int64_t channel = 0; channel < call.batch * call.spec->in; ++channel) {
    float sum = 0.0F;
    ForEachChunk(plane, [&](std::int64_t begin, std::int64_t count) {
      ChunkBuffer x;
      ChunkBuffer g;
      const std::int64_t offset = channel * plane + begin;
      sum += VectorDot(ReadFloats(call.inputs[0], offset, count, x.values.data()),
                       ReadFloats(dz, offset, count, g.values.data()), count);
    });
    StoreFloats(&sum, 1, dfactor, channel);
  }
}

// Where gate and up lie: in two tensors, taken as one row, or side by side in each row of one.
struct GatedRows {
  std::int64_t count = 1;
  std::int64_t features = 0;  // of the result's row
  std::int64_t stride = 0;    // of the inputs' rows
  std::size_t up = 1;         // the input that holds up
  std::int64_t up_first = 0;  // where it begins in a row
};

GatedRows RowsOfGated(const ModelOpCall& call, std::int64_t elements) {
  const std::int64_t in = call.spec->in;
  if (!call.spec->packed_gate) {
    return {.features = elements};
  }
  return {.count = elements / in, .features = in, .stride = 2 * in, .up = 0, .up_first = in};
}

}  // namespace

void ActivationForward(const ModelOpCall& call) {
  const Activation function = call.spec->activation;
  MapOne(
      call.team, call.inputs[0], call.outputs[0],
      [function](const float* x, float* y, std::int64_t n) { VectorActivate(function, x, y, n); });
}

void ActivationBackward(const ModelOpCall& call) {
  const Activation function = call.spec->activation;
  const ConstView kept =
      ActivationKeepsResult(function) ? AsConst(call.outputs[0]) : call.inputs[0];
  MapTwo(call.team, kept, call.output_grads[0], call.input_grads[0],
         [function](const float* x, const float* dy, float* dx, std::int64_t n) {
           VectorActivateGrad(function, x, dy, dx, n);
         });
}

void GatedActivationForward(const ModelOpCall& call) {
  const Activation function = call.spec->activation;
  const View& y = call.outputs[0];
  const GatedRows rows = RowsOfGated(call, y.elements);
  ForEachRowChunk(
      call.team, rows.count, rows.features,
      [&](std::int64_t row, std::int64_t begin, std::int64_t n) {
        ChunkBuffer gate_buffer;
        ChunkBuffer up_buffer;
        ChunkBuffer y_buffer;
        ChunkBuffer activated;
        const std::int64_t at = row * rows.stride + begin;
        const std::int64_t y_at = row * rows.features + begin;
        float* const result = ResultFloats(y, y_at, y_buffer.values.data());
        VectorActivate(function, ReadFloats(call.inputs[0], at, n, gate_buffer.values.data()),
                       activated.values.data(), n);
        VectorProduct(
            activated.values.data(),
            ReadFloats(call.inputs[rows.up], rows.up_first + at, n, up_buffer.values.data()),
            result, n);
        FinishFloats(result, n, y, y_at);
      });
}

void GatedActivationBackward(const ModelOpCall& call) {
  const Activation function = call.spec->activation;
  const ConstView& dy = call.output_grads[0];
  const GatedRows rows = RowsOfGated(call, dy.elements);
  const View& dgate = call.input_grads[0];
  const View& dup = call.input_grads[rows.up];
  ForEachRowChunk(
      call.team, rows.count, rows.features,
      [&](std::int64_t row, std::int64_t begin, std::int64_t n) {
        ChunkBuffer gate_buffer;
        ChunkBuffer up_buffer;
        ChunkBuffer dy_buffer;
        ChunkBuffer activated;
        ChunkBuffer result;
        const std::int64_t at = row * rows.stride + begin;
        const std::int64_t up_at = rows.up_first + at;
        const float* const gate = ReadFloats(call.inputs[0], at, n, gate_buffer.values.data());
        const float* const up = ReadFloats(call.inputs[rows.up], up_at, n, up_buffer.values.data());
        const float* const grad =
            ReadFloats(dy, row * rows.features + begin, n, dy_buffer.values.data());
        VectorActivate(function, gate, activated.values.data(), n);
        if (dup.data != nullptr) {
          VectorProduct(grad, activated.values.data(), result.values.data(), n);
          StoreFloats(result.values.data(), n, dup, up_at);
        }
        if (dgate.data != nullptr) {
          VectorProduct(grad, up, result.values.data(), n);
          const float* const kept =
              ActivationKeepsResult(function) ? activated.values.data() : gate;
          VectorActivateGrad(function, kept, result.values.data(), result.values.data(), n);
          StoreFloats(result.values.data(), n, dgate, at);
        }
      });
}

void AddForward(const ModelOpCall& call) {
  const ConstView& other = call.spec->has_bias ? call.params[0] : call.inputs[1];
  // A table that the samples share may stand on either side.
  const bool swap = other.elements > call.inputs[0].elements;
  MapTwo(call.team, swap ? other : call.inputs[0], swap ? call.inputs[0] : other, call.outputs[0],
         Sum);
}

// The gradient goes on unchanged to every operand that is as large as the sum; one that the samples
// share gets the sum over the samples.
void AddBackward(const ModelOpCall& call) {
  const ConstView& dy = call.output_grads[0];
  const auto sum_into = [&](std::int64_t elements, const auto& store) {
    ForEachChunk(call.team, elements, [&](std::int64_t begin, std::int64_t n) {
      ChunkBuffer total;
      std::fill_n(total.values.data(), n, 0.0F);
      for (std::int64_t start = 0; start < dy.elements; start += elements) {
        ChunkBuffer buffer;
        VectorAdd(1.0F, ReadFloats(dy, start + begin, n, buffer.values.data()), total.values.data(),
                  n);
      }
      store(total.values.data(), begin, n);
    });
  };
  for (const View& dx : call.input_grads) {
    if (dx.data == nullptr) {
      continue;
    }
    if (dx.elements == dy.elements) {
      Copy(call.team, dy, dx);
    } else {
      sum_into(dx.elements, [&](const float* values, std::int64_t begin, std::int64_t n) {
        StoreFloats(values, n, dx, begin);
      });
    }
  }
  for (const ParamGrad& grad : call.param_grads) {
    if (grad.view.data != nullptr) {
      sum_into(grad.view.elements, [&](const float* values, std::int64_t begin, std::int64_t n) {
        StoreParamGrad(values, n, grad, begin);
      });
    }
  }
}

void MulForward(const ModelOpCall& call) {
  if (!ScalesChannels(call)) {
    MapTwo(call.team, call.inputs[0], call.inputs[1], call.outputs[0], VectorProduct);
    return;
  }
  MapPlanes(call, [&](std::int64_t channel, std::int64_t begin, std::int64_t count) {
    ChunkBuffer in;
    ChunkBuffer out;
    float* const result = ResultFloats(call.outputs[0], begin, out.values.data());
    VectorScale(ReadOne(call.inputs[1], channel),
                ReadFloats(call.inputs[0], begin, count, in.values.data()), result, count);
    FinishFloats(result, count, call.outputs[0], begin);
  });
}

void MulBackward(const ModelOpCall& call) {
  if (ScalesChannels(call)) {
    ChannelScaleGrad(call);
    return;
  }
  for (std::size_t i = 0; i < 2; ++i) {
    if (call.input_grads[i].data != nullptr) {
      MapTwo(call.team, call.output_grads[0], call.inputs[1 - i], call.input_grads[i],
             VectorProduct);
    }
  }
}

void ScaleForward(const ModelOpCall& call) {
  const auto factor = static_cast<float>(call.spec->factor);
  MapOne(call.team, call.inputs[0], call.outputs[0],
         [factor](const float* x, float* y, std::int64_t n) { VectorScale(factor, x, y, n); });
}

void ScaleBackward(const ModelOpCall& call) {
  const auto factor = static_cast<float>(call.spec->factor);
  MapOne(call.team, call.output_grads[0], call.input_grads[0],
         [factor](const float* dy, float* dx, std::int64_t n) { VectorScale(factor, dy, dx, n); });
}

}  // namespace shardwright
