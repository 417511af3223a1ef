// Pools and batch norm over images (channels, height, width).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"

namespace shardwright {
namespace {

// The part of the input that one output pixel covers.
struct Window {
  std::int64_t y_begin = 0, y_end = 0, x_begin = 0, x_end = 0;
};

// A global pool's kernel is the image's height; its window is the whole image.
bool IsGlobal(const OpSpec& spec) {
  return spec.height_out == 1 && spec.width_out == 1 && spec.kernel == spec.height &&
         spec.stride == spec.height && spec.padding == 0;
}

Window WindowOf(const OpSpec& spec, std::int64_t oy, std::int64_t ox) {
  if (IsGlobal(spec)) {
    return {0, spec.height, 0, spec.width};
  }
  const std::int64_t y = oy * spec.stride - spec.padding;
  const std::int64_t x = ox * spec.stride - spec.padding;
  return {std::max<std::int64_t>(0, y), std::min(spec.height, y + spec.kernel),
          std::max<std::int64_t>(0, x), std::min(spec.width, x + spec.kernel)};
}

// Calls f(element of the output plane, window) for every output pixel.
template <class F>
void ForEachWindow(const OpSpec& spec, const F& f) {
  for (std::int64_t oy = 0; oy < spec.height_out; ++oy) {
    for (std::int64_t ox = 0; ox < spec.width_out; ++ox) {
      f(oy * spec.width_out + ox, WindowOf(spec, oy, ox));
    }
  }
}

std::int64_t PlaneIn(const OpSpec& spec) {
  return spec.height * spec.width;
}
std::int64_t PlaneOut(const OpSpec& spec) {
  return spec.height_out * spec.width_out;
}

// Padding counts as zeros of the average, PyTorch's count_include_pad.
float AverageFactor(const OpSpec& spec) {
  const std::int64_t n = IsGlobal(spec) ? PlaneIn(spec) : spec.kernel * spec.kernel;
  return 1.0F / static_cast<float>(n);
}

}  // namespace

// Keeps where in its plane each maximum was; the first one of equals, as PyTorch.
void MaxPoolForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  float* const in_buffer = scratch.Floats(PlaneIn(spec));
  float* const out_buffer = scratch.Floats(PlaneOut(spec));
  auto* const places = reinterpret_cast<std::int32_t*>(call.saved.data());
  for (std::int64_t plane = 0; plane < call.batch * spec.in; ++plane) {
    const float* const x =
        ReadFloats(call.inputs[0], plane * PlaneIn(spec), PlaneIn(spec), in_buffer);
    ForEachWindow(spec, [&](std::int64_t out, const Window& w) {
      float largest = -std::numeric_limits<float>::infinity();
      std::int64_t place = w.y_begin * spec.width + w.x_begin;
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        for (std::int64_t i = w.x_begin; i < w.x_end; ++i) {
          const float value = x[y * spec.width + i];
          if (value > largest || std::isnan(value)) {
            largest = value;
            place = y * spec.width + i;
          }
        }
      }
      out_buffer[out] = largest;
      places[plane * PlaneOut(spec) + out] = static_cast<std::int32_t>(place);
    });
    StoreFloats(out_buffer, PlaneOut(spec), call.outputs[0], plane * PlaneOut(spec));
  }
}

void MaxPoolBackward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  float* const in_buffer = scratch.Floats(PlaneIn(spec));
  float* const out_buffer = scratch.Floats(PlaneOut(spec));
  const auto* const places = reinterpret_cast<const std::int32_t*>(call.saved.data());
  for (std::int64_t plane = 0; plane < call.batch * spec.in; ++plane) {
    const std::int64_t at = plane * PlaneOut(spec);
    const float* const dy = ReadFloats(call.output_grads[0], at, PlaneOut(spec), out_buffer);
    std::fill_n(in_buffer, PlaneIn(spec), 0.0F);
    for (std::int64_t i = 0; i < PlaneOut(spec); ++i) {
      in_buffer[places[at + i]] += dy[i];
    }
    StoreFloats(in_buffer, PlaneIn(spec), call.input_grads[0], plane * PlaneIn(spec));
  }
}

void AvgPoolForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  float* const in_buffer = scratch.Floats(PlaneIn(spec));
  float* const out_buffer = scratch.Floats(PlaneOut(spec));
  const float factor = AverageFactor(spec);
  for (std::int64_t plane = 0; plane < call.batch * spec.in; ++plane) {
    const float* const x =
        ReadFloats(call.inputs[0], plane * PlaneIn(spec), PlaneIn(spec), in_buffer);
    ForEachWindow(spec, [&](std::int64_t out, const Window& w) {
      float sum = 0.0F;
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        sum += VectorSum(x + y * spec.width + w.x_begin, w.x_end - w.x_begin);
      }
      out_buffer[out] = sum * factor;
    });
    StoreFloats(out_buffer, PlaneOut(spec), call.outputs[0], plane * PlaneOut(spec));
  }
}

void AvgPoolBackward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  Scratch scratch(call.workspace);
  float* const in_buffer = scratch.Floats(PlaneIn(spec));
  float* const out_buffer = scratch.Floats(PlaneOut(spec));
  const float factor = AverageFactor(spec);
  for (std::int64_t plane = 0; plane < call.batch * spec.in; ++plane) {
    const float* const dy =
        ReadFloats(call.output_grads[0], plane * PlaneOut(spec), PlaneOut(spec), out_buffer);
    std::fill_n(in_buffer, PlaneIn(spec), 0.0F);
    ForEachWindow(spec, [&](std::int64_t out, const Window& w) {
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        for (std::int64_t i = w.x_begin; i < w.x_end; ++i) {
          in_buffer[y * spec.width + i] += dy[out] * factor;
        }
      }
    });
    StoreFloats(in_buffer, PlaneIn(spec), call.input_grads[0], plane * PlaneIn(spec));
  }
}

namespace {

// PyTorch's BatchNorm2d: share of the new batch in the running statistics.
constexpr float kMomentum = 0.1F;

// Sum over the samples of f(offset of a chunk, count) for one channel; chunks in fp32, their sum in
// fp64, since batch and plane together may be millions of elements.
template <class F>
double SumChannel(const ModelOpCall& call, std::int64_t channel, const F& f) {
  const OpSpec& spec = *call.spec;
  double sum = 0.0;
  for (std::int64_t sample = 0; sample < call.batch; ++sample) {
    const std::int64_t base = (sample * spec.in + channel) * PlaneIn(spec);
    ForEachChunk(PlaneIn(spec), [&](std::int64_t begin, std::int64_t n) {
      sum += static_cast<double>(f(base + begin, n));
    });
  }
  return sum;
}

SHARDWRIGHT_CLONES void Affine(const float* x, float mean, float factor, float shift, float* y,
                               std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    y[i] = (x[i] - mean) * factor + shift;
  }
}

struct ChannelStatistics {
  float mean = 0.0F;
  float inverse = 0.0F;
};

ChannelStatistics MeasureChannel(const ModelOpCall& call, std::int64_t channel) {
  const OpSpec& spec = *call.spec;
  const auto epsilon = static_cast<float>(spec.epsilon);
  if (!call.is_training && call.buffers != nullptr) {
    return {call.buffers[channel], 1.0F / std::sqrt(call.buffers[spec.in + channel] + epsilon)};
  }
  const ConstView& x = call.inputs[0];
  const auto n = static_cast<double>(call.batch * PlaneIn(spec));
  ChunkBuffer buffer;
  const double mean =
      SumChannel(call, channel,
                 [&](std::int64_t at, std::int64_t count) {
                   return VectorSum(ReadFloats(x, at, count, buffer.values.data()), count);
                 }) /
      n;
  const double squares = SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
    return VectorSquares(ReadFloats(x, at, count, buffer.values.data()), static_cast<float>(mean),
                         count);
  });
  if (call.buffers != nullptr) {
    float* const running = call.buffers + channel;
    running[0] += kMomentum * (static_cast<float>(mean) - running[0]);
    const auto unbiased = static_cast<float>(squares / std::max(1.0, n - 1.0));
    running[spec.in] += kMomentum * (unbiased - running[spec.in]);
  }
  return {static_cast<float>(mean), 1.0F / std::sqrt(static_cast<float>(squares / n) + epsilon)};
}

float ReadParam(const ModelOpCall& call, std::size_t param, std::int64_t i) {
  float value = 0.0F;
  LoadFloats(call.params[param], i, 1, &value);
  return value;
}

}  // namespace

// Statistics of this rank's micro-batch. Keeps means, then inverse deviations.
void BatchNormForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  auto* const means = reinterpret_cast<float*>(call.saved.data());
  for (std::int64_t channel = 0; channel < spec.in; ++channel) {
    const ChannelStatistics s = MeasureChannel(call, channel);
    means[channel] = s.mean;
    means[spec.in + channel] = s.inverse;
    const float factor = s.inverse * ReadParam(call, 0, channel);
    const float shift = ReadParam(call, 1, channel);
    (void)SumChannel(call, channel, [&](std::int64_t at, std::int64_t n) {
      ChunkBuffer in;
      ChunkBuffer out;
      float* const y = ResultFloats(call.outputs[0], at, out.values.data());
      Affine(ReadFloats(call.inputs[0], at, n, in.values.data()), s.mean, factor, shift, y, n);
      FinishFloats(y, n, call.outputs[0], at);
      return 0.0F;
    });
  }
}

// With xhat = (x - mean) * inverse: dx = weight * inverse * (dy - mean(dy) - xhat mean(dy xhat)).
void BatchNormBackward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const auto* const means = reinterpret_cast<const float*>(call.saved.data());
  const auto n = static_cast<double>(call.batch * PlaneIn(spec));
  for (std::int64_t channel = 0; channel < spec.in; ++channel) {
    const float mean = means[channel];
    const float inverse = means[spec.in + channel];
    ChunkBuffer x_buffer;
    ChunkBuffer dy_buffer;
    ChunkBuffer normalized;
    const double sum = SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
      return VectorSum(ReadFloats(call.output_grads[0], at, count, dy_buffer.values.data()), count);
    });
    const double product = SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
      Affine(ReadFloats(call.inputs[0], at, count, x_buffer.values.data()), mean, inverse, 0.0F,
             normalized.values.data(), count);
      return VectorDot(ReadFloats(call.output_grads[0], at, count, dy_buffer.values.data()),
                       normalized.values.data(), count);
    });
    const float grads[] = {static_cast<float>(product), static_cast<float>(sum)};
    for (std::size_t i = 0; i < call.param_grads.size(); ++i) {
      if (call.param_grads[i].view.data != nullptr) {
        StoreParamGrad(&grads[i], 1, call.param_grads[i], channel);
      }
    }
    if (call.input_grads[0].data == nullptr) {
      continue;
    }
    const float factor = ReadParam(call, 0, channel) * inverse;
    const auto mean_dy = static_cast<float>(sum / n);
    const auto mean_product = static_cast<float>(product / n);
    (void)SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
      Affine(ReadFloats(call.inputs[0], at, count, x_buffer.values.data()), mean, inverse, 0.0F,
             normalized.values.data(), count);
      float* const dx = normalized.values.data();
      VectorScale(-factor * mean_product, dx, dx, count);
      VectorAdd(factor, ReadFloats(call.output_grads[0], at, count, dy_buffer.values.data()), dx,
                count);
      Affine(dx, factor * mean_dy, 1.0F, 0.0F, dx, count);
      StoreFloats(dx, count, call.input_grads[0], at);
      return 0.0F;
    });
  }
}

}  // namespace shardwright
