// Pools and batch norm over images (channels, height, width).

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

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

// Calls f(call, first, last, workspace) for parts of the planes, which threads share.
template <class F>
void SharePlanes(const ModelOpCall& call, const F& f) {
  const OpSpec& spec = *call.spec;
  ForEachPart(call.team, call.batch * spec.in, LeastRows(std::max(PlaneIn(spec), PlaneOut(spec))),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                f(call, first, last, WorkspaceOf(call, worker));
              });
}

// Windows at the edge, which padding is part of, and those of a global pool.
void MaxOfWindow(const OpSpec& spec, const float* x, std::int64_t oy, std::int64_t ox,
                 float& largest, std::int32_t& place) {
  const Window w = WindowOf(spec, oy, ox);
  largest = -std::numeric_limits<float>::infinity();
  place = static_cast<std::int32_t>(w.y_begin * spec.width + w.x_begin);
  for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
    for (std::int64_t i = w.x_begin; i < w.x_end; ++i) {
      const float value = x[y * spec.width + i];
      if (value > largest || std::isnan(value)) {
        largest = value;
        place = static_cast<std::int32_t>(y * spec.width + i);
      }
    }
  }
}

// The outputs of row `oy`: those whose windows lie inside the image side by side.
void MaxPoolRow(const OpSpec& spec, const float* x, std::int64_t oy, float* largest,
                std::int32_t* place) {
  const std::int64_t y = oy * spec.stride - spec.padding;
  std::int64_t begin = 0, end = 0;
  if (!IsGlobal(spec) && y >= 0 && y + spec.kernel <= spec.height && spec.width >= spec.kernel) {
    begin = std::min(spec.width_out, (spec.padding + spec.stride - 1) / spec.stride);
    const std::int64_t inside = (spec.width - spec.kernel + spec.padding) / spec.stride + 1;
    end = std::max(begin, std::min(spec.width_out, inside));
    const std::int64_t at = y * spec.width + begin * spec.stride - spec.padding;
    MaxOfWindows(x + at, spec.width, spec.kernel, spec.stride, end - begin, largest + begin,
                 place + begin);
    for (std::int64_t i = begin; i < end; ++i) {
      place[i] += static_cast<std::int32_t>(at);
    }
  }
  for (std::int64_t ox = 0; ox < begin; ++ox) {
    MaxOfWindow(spec, x, oy, ox, largest[ox], place[ox]);
  }
  for (std::int64_t ox = end; ox < spec.width_out; ++ox) {
    MaxOfWindow(spec, x, oy, ox, largest[ox], place[ox]);
  }
}

// Calls f(plane, in, out) for planes [first, last), with memory for the elements of one on either
// side of the pool.
template <class F>
void ForEachPlane(const OpSpec& spec, std::int64_t first, std::int64_t last,
                  std::span<std::byte> workspace, const F& f) {
  Scratch scratch(workspace);
  float* const in = scratch.Floats(PlaneIn(spec));
  float* const out = scratch.Floats(PlaneOut(spec));
  for (std::int64_t plane = first; plane < last; ++plane) {
    f(plane, in, out);
  }
}

// Keeps where in its plane each maximum was; the first one of equals, as PyTorch.
void MaxPoolForwardPlanes(const ModelOpCall& call, std::int64_t first, std::int64_t last,
                          std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  auto* const places = reinterpret_cast<std::int32_t*>(call.saved.data());
  ForEachPlane(spec, first, last, workspace, [&](std::int64_t plane, float* in, float* out) {
    const float* const x = ReadFloats(call.inputs[0], plane * PlaneIn(spec), PlaneIn(spec), in);
    for (std::int64_t oy = 0; oy < spec.height_out; ++oy) {
      const std::int64_t row = oy * spec.width_out;
      MaxPoolRow(spec, x, oy, out + row, places + plane * PlaneOut(spec) + row);
    }
    StoreFloats(out, PlaneOut(spec), call.outputs[0], plane * PlaneOut(spec));
  });
}

void MaxPoolBackwardPlanes(const ModelOpCall& call, std::int64_t first, std::int64_t last,
                           std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  const auto* const places = reinterpret_cast<const std::int32_t*>(call.saved.data());
  ForEachPlane(spec, first, last, workspace, [&](std::int64_t plane, float* in, float* out) {
    const std::int64_t at = plane * PlaneOut(spec);
    const float* const dy = ReadFloats(call.output_grads[0], at, PlaneOut(spec), out);
    std::fill_n(in, PlaneIn(spec), 0.0F);
    for (std::int64_t i = 0; i < PlaneOut(spec); ++i) {
      in[places[at + i]] += dy[i];
    }
    StoreFloats(in, PlaneIn(spec), call.input_grads[0], plane * PlaneIn(spec));
  });
}

void AvgPoolForwardPlanes(const ModelOpCall& call, std::int64_t first, std::int64_t last,
                          std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  const float factor = AverageFactor(spec);
  ForEachPlane(spec, first, last, workspace, [&](std::int64_t plane, float* in, float* out) {
    const float* const x = ReadFloats(call.inputs[0], plane * PlaneIn(spec), PlaneIn(spec), in);
    ForEachWindow(spec, [&](std::int64_t i, const Window& w) {
      float sum = 0.0F;
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        sum += VectorSum(x + y * spec.width + w.x_begin, w.x_end - w.x_begin);
      }
      out[i] = sum * factor;
    });
    StoreFloats(out, PlaneOut(spec), call.outputs[0], plane * PlaneOut(spec));
  });
}

void AvgPoolBackwardPlanes(const ModelOpCall& call, std::int64_t first, std::int64_t last,
                           std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  const float factor = AverageFactor(spec);
  ForEachPlane(spec, first, last, workspace, [&](std::int64_t plane, float* in, float* out) {
    const float* const dy =
        ReadFloats(call.output_grads[0], plane * PlaneOut(spec), PlaneOut(spec), out);
    std::fill_n(in, PlaneIn(spec), 0.0F);
    ForEachWindow(spec, [&](std::int64_t o, const Window& w) {
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        for (std::int64_t i = w.x_begin; i < w.x_end; ++i) {
          in[y * spec.width + i] += dy[o] * factor;
        }
      }
    });
    StoreFloats(in, PlaneIn(spec), call.input_grads[0], plane * PlaneIn(spec));
  });
}

}  // namespace

void MaxPoolForward(const ModelOpCall& call) {
  SharePlanes(call, MaxPoolForwardPlanes);
}

void MaxPoolBackward(const ModelOpCall& call) {
  SharePlanes(call, MaxPoolBackwardPlanes);
}

void AvgPoolForward(const ModelOpCall& call) {
  SharePlanes(call, AvgPoolForwardPlanes);
}

void AvgPoolBackward(const ModelOpCall& call) {
  SharePlanes(call, AvgPoolBackwardPlanes);
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

// What one rank, or all of them, saw of a channel: `squares` is the sum of squared distances from
// the mean.
struct ChannelMoments {
  double count = 0.0;
  double mean = 0.0;
  double squares = 0.0;
};

ChannelMoments MeasureChannel(const ModelOpCall& call, std::int64_t channel) {
  const ConstView& x = call.inputs[0];
  ChannelMoments m;
  m.count = static_cast<double>(call.batch * PlaneIn(*call.spec));
  ChunkBuffer buffer;
  m.mean = SumChannel(call, channel,
                      [&](std::int64_t at, std::int64_t count) {
                        return VectorSum(ReadFloats(x, at, count, buffer.values.data()), count);
                      }) /
           m.count;
  m.squares = SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
    return VectorSquares(ReadFloats(x, at, count, buffer.values.data()), static_cast<float>(m.mean),
                         count);
  });
  return m;
}

// Calls f(channel) for every channel; threads share them.
template <class F>
void ShareChannels(const ModelOpCall& call, const F& f) {
  ForEachPart(call.team, call.spec->in, LeastRows(call.batch * PlaneIn(*call.spec)),
              [&](std::int64_t first, std::int64_t last, std::size_t) {
                for (std::int64_t channel = first; channel < last; ++channel) {
                  f(channel);
                }
              });
}

// A rank's part of the exchange: means, squares, the count of elements per channel.
void WriteMoments(const ModelOpCall& call) {
  const std::int64_t channels = call.spec->in;
  auto* const mine = reinterpret_cast<float*>(call.exchange.data());
  ShareChannels(call, [&](std::int64_t channel) {
    const ChannelMoments m = MeasureChannel(call, channel);
    mine[channel] = static_cast<float>(m.mean);
    mine[channels + channel] = static_cast<float>(m.squares);
  });
  mine[2 * channels] = static_cast<float>(call.batch * PlaneIn(*call.spec));
}

// The moments of all ranks together, by Chan, Golub and LeVeque's rule, in the ranks' order.
ChannelMoments JoinMoments(const ModelOpCall& call, std::int64_t channel) {
  const std::int64_t channels = call.spec->in;
  const auto* part = reinterpret_cast<const float*>(call.exchange.data());
  const std::int64_t per_rank = 2 * channels + 1;
  const auto ranks = static_cast<std::int64_t>(call.exchange.size() / sizeof(float)) / per_rank;
  ChannelMoments all;
  for (std::int64_t r = 0; r < ranks; ++r, part += per_rank) {
    const auto count = static_cast<double>(part[2 * channels]);
    const double distance = static_cast<double>(part[channel]) - all.mean;
    all.squares += static_cast<double>(part[channels + channel]) +
                   distance * distance * all.count * count / (all.count + count);
    all.count += count;
    all.mean += distance * count / all.count;
  }
  return all;
}

ChannelStatistics StatisticsOf(const ModelOpCall& call, std::int64_t channel) {
  const OpSpec& spec = *call.spec;
  const auto epsilon = static_cast<float>(spec.epsilon);
  if (!call.is_training && call.buffers != nullptr) {
    return {call.buffers[channel], 1.0F / std::sqrt(call.buffers[spec.in + channel] + epsilon)};
  }
  const ChannelMoments m = call.part == OpPart::kAfterExchange ? JoinMoments(call, channel)
                                                               : MeasureChannel(call, channel);
  if (call.buffers != nullptr) {
    float* const running = call.buffers + channel;
    running[0] += kMomentum * (static_cast<float>(m.mean) - running[0]);
    const auto unbiased = static_cast<float>(m.squares / std::max(1.0, m.count - 1.0));
    running[spec.in] += kMomentum * (unbiased - running[spec.in]);
  }
  if (call.part == OpPart::kAfterExchange && channel == 0) {  // backward divides by it
    reinterpret_cast<float*>(call.saved.data())[2 * spec.in] = static_cast<float>(m.count);
  }
  return {static_cast<float>(m.mean),
          1.0F / std::sqrt(static_cast<float>(m.squares / m.count) + epsilon)};
}

float ReadParam(const ModelOpCall& call, std::size_t param, std::int64_t i) {
  float value = 0.0F;
  LoadFloats(call.params[param], i, 1, &value);
  return value;
}

}  // namespace

// Statistics of this rank's micro-batch, or of all ranks'. Keeps means, then inverse deviations,
// then, of all ranks, the number of elements per channel.
void BatchNormForward(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  if (call.part == OpPart::kBeforeExchange) {
    WriteMoments(call);
    return;
  }
  auto* const means = reinterpret_cast<float*>(call.saved.data());
  ShareChannels(call, [&](std::int64_t channel) {
    const ChannelStatistics s = StatisticsOf(call, channel);
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
  });
}

namespace {

// Of dy xhat and of dy over this rank's elements of a channel: the gradients of weight and bias.
struct ChannelSums {
  double product = 0.0;
  double sum = 0.0;
};

ChannelSums SumGradients(const ModelOpCall& call, std::int64_t channel) {
  const auto* const means = reinterpret_cast<const float*>(call.saved.data());
  const float mean = means[channel];
  const float inverse = means[call.spec->in + channel];
  ChunkBuffer x;
  ChunkBuffer dy;
  ChunkBuffer normalized;
  ChannelSums sums;
  sums.sum = SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
    return VectorSum(ReadFloats(call.output_grads[0], at, count, dy.values.data()), count);
  });
  sums.product = SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
    Affine(ReadFloats(call.inputs[0], at, count, x.values.data()), mean, inverse, 0.0F,
           normalized.values.data(), count);
    return VectorDot(ReadFloats(call.output_grads[0], at, count, dy.values.data()),
                     normalized.values.data(), count);
  });
  const float grads[] = {static_cast<float>(sums.product), static_cast<float>(sums.sum)};
  for (std::size_t i = 0; i < call.param_grads.size(); ++i) {
    if (call.param_grads[i].view.data != nullptr) {
      StoreParamGrad(&grads[i], 1, call.param_grads[i], channel);
    }
  }
  return sums;
}

// With xhat = (x - mean) * inverse: dx = weight * inverse * (dy - mean(dy) - xhat mean(dy xhat)).
void WriteInputGradient(const ModelOpCall& call, std::int64_t channel, const ChannelSums& means) {
  const auto* const kept = reinterpret_cast<const float*>(call.saved.data());
  const float mean = kept[channel];
  const float inverse = kept[call.spec->in + channel];
  const float factor = ReadParam(call, 0, channel) * inverse;
  const auto mean_dy = static_cast<float>(means.sum);
  const auto mean_product = static_cast<float>(means.product);
  ChunkBuffer x;
  ChunkBuffer dy;
  ChunkBuffer normalized;
  (void)SumChannel(call, channel, [&](std::int64_t at, std::int64_t count) {
    Affine(ReadFloats(call.inputs[0], at, count, x.values.data()), mean, inverse, 0.0F,
           normalized.values.data(), count);
    float* const dx = normalized.values.data();
    VectorScale(-factor * mean_product, dx, dx, count);
    VectorAdd(factor, ReadFloats(call.output_grads[0], at, count, dy.values.data()), dx, count);
    Affine(dx, factor * mean_dy, 1.0F, 0.0F, dx, count);
    StoreFloats(dx, count, call.input_grads[0], at);
    return 0.0F;
  });
}

}  // namespace

void BatchNormBackward(const ModelOpCall& call) {
  const std::int64_t channels = call.spec->in;
  auto* const exchange = reinterpret_cast<float*>(call.exchange.data());
  auto n = static_cast<double>(call.batch * PlaneIn(*call.spec));
  if (call.part == OpPart::kAfterExchange) {
    n = static_cast<double>(reinterpret_cast<const float*>(call.saved.data())[2 * channels]);
  }
  ShareChannels(call, [&](std::int64_t channel) {
    ChannelSums sums;
    if (call.part == OpPart::kAfterExchange) {
      sums = {static_cast<double>(exchange[channel]),
              static_cast<double>(exchange[channels + channel])};
    } else {
      sums = SumGradients(call, channel);
    }
    if (call.part == OpPart::kBeforeExchange) {
      exchange[channel] = static_cast<float>(sums.product);
      exchange[channels + channel] = static_cast<float>(sums.sum);
    } else if (call.input_grads[0].data != nullptr) {
      WriteInputGradient(call, channel, {sums.product / n, sums.sum / n});
    }
  });
}

}  // namespace shardwright
