#pragma once

// Convolutions as matrix products whose operands are gathered on the way, pools, batch norm,
// products per channel. Images are (channels, height, width).

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "executor/cuda/kernels/tile.h"

namespace shardwright::gpu {

struct ConvArgs {
  Array x = {}, w = {}, bias = {}, y = {};  // in backward x or y is the gradient that is made
  Array grad = {};                          // of the weight or bias
  bool adds = false;
  bool tokens_out = false;  // y is (pixels, channels)
  std::int64_t batch = 0, in = 0, out = 0, groups = 1;
  std::int64_t height = 0, width = 0, height_out = 0, width_out = 0;
  std::int64_t kernel = 0, stride = 0, padding = 0;
  DType multiply_as = DType::kFp32;
};

struct ConvShape {
  std::int64_t in, out, taps, pixels_in, pixels_out;  // of one group
};
SW_DEVICE ConvShape ShapeOf(const ConvArgs& a) {
  const std::int64_t in = a.in / a.groups;
  return {in, a.out / a.groups, in * a.kernel * a.kernel, a.height * a.width,
          a.height_out * a.width_out};
}
SW_DEVICE float LoadImage(const ConvArgs& a, std::int64_t channel, std::int64_t y, std::int64_t x) {
  if (y < 0 || y >= a.height || x < 0 || x >= a.width) {
    return 0.0F;
  }
  return Load(a.x, (channel * a.height + y) * a.width + x);
}
SW_DEVICE std::int64_t OutputAt(const ConvArgs& a, std::int64_t sample, std::int64_t channel,
                                std::int64_t pixel) {
  const std::int64_t pixels = a.height_out * a.width_out;
  return a.tokens_out ? (sample * pixels + pixel) * a.out + channel
                      : (sample * a.out + channel) * pixels + pixel;
}
// The input that tap `tap` of output pixel `pixel` reads. `first_channel`: of the sample's group.
SW_DEVICE float LoadTap(const ConvArgs& a, std::int64_t first_channel, std::int64_t tap,
                        std::int64_t pixel) {
  const std::int64_t area = a.kernel * a.kernel;
  const std::int64_t y = pixel / a.width_out * a.stride + tap % area / a.kernel - a.padding;
  const std::int64_t x = pixel % a.width_out * a.stride + tap % a.kernel - a.padding;
  return LoadImage(a, first_channel + tap / area, y, x);
}

// Calls f with a value of the type to multiply in.
template <class F>
SW_DEVICE void WithType(DType multiply_as, const F& f) {
  switch (multiply_as) {
    case DType::kBf16:
      return f(Bf16{});
    case DType::kFp16:
      return f(Fp16{});
    default:
      return f(float{});
  }
}

SW_DEVICE std::int64_t Parts(std::int64_t n, std::int64_t part) {
  return (n + part - 1) / part;
}

// Rows: output pixels; columns: output channels of a group; depth: taps. Blocks: samples x groups x
// tiles.
struct ConvKernel {
  static constexpr KernelId kId = KernelId::kConv;
  using Args = ConvArgs;
  static constexpr int kThreads = kProductThreads;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    WithType(a.multiply_as, [&](auto element) {
      const ConvShape s = ShapeOf(a);
      const std::int64_t across = Parts(s.out, kProductColumns);
      const std::int64_t tiles = across * Parts(s.pixels_out, kProductRows);
      const std::int64_t group = block.index() / tiles % a.groups;
      const std::int64_t sample = block.index() / tiles / a.groups;
      const std::int64_t pixel = block.index() % tiles / across * kProductRows;
      const std::int64_t channel = block.index() % across * kProductColumns;
      TileProduct<decltype(element)>(
          block, s.taps,
          [&](int i, std::int64_t tap) {
            return pixel + i < s.pixels_out
                       ? LoadTap(a, sample * a.in + group * s.in, tap, pixel + i)
                       : 0.0F;
          },
          [&](std::int64_t tap, int j) {
            return channel + j < s.out ? Load(a.w, (group * s.out + channel + j) * s.taps + tap)
                                       : 0.0F;
          },
          [&](int i, int j, float sum) {
            if (pixel + i < s.pixels_out && channel + j < s.out) {
              const std::int64_t c = group * s.out + channel + j;
              const float bias = a.bias.data != nullptr ? Load(a.bias, c) : 0.0F;
              Store(a.y, OutputAt(a, sample, c, pixel + i), sum + bias);
            }
          });
    });
  }
};

// Rows: input pixels; columns: input channels of a group; depth: (output channel, tap of the
// kernel).
struct ConvDataGradKernel {
  static constexpr KernelId kId = KernelId::kConvDataGrad;
  using Args = ConvArgs;
  static constexpr int kThreads = kProductThreads;

  // The output's gradient that the input pixel receives through one tap, or 0.
  static SW_DEVICE float Through(const Args& a, std::int64_t sample, std::int64_t channel,
                                 std::int64_t tap, std::int64_t pixel) {
    const std::int64_t y = pixel / a.width + a.padding - tap / a.kernel;
    const std::int64_t x = pixel % a.width + a.padding - tap % a.kernel;
    if (y < 0 || x < 0 || y % a.stride != 0 || x % a.stride != 0 || y / a.stride >= a.height_out ||
        x / a.stride >= a.width_out) {
      return 0.0F;
    }
    return Load(a.y, OutputAt(a, sample, channel, y / a.stride * a.width_out + x / a.stride));
  }

  static SW_DEVICE void Run(Block& block, const Args& a) {
    WithType(a.multiply_as, [&](auto element) {
      const ConvShape s = ShapeOf(a);
      const std::int64_t area = a.kernel * a.kernel;
      const std::int64_t across = Parts(s.in, kProductColumns);
      const std::int64_t tiles = across * Parts(s.pixels_in, kProductRows);
      const std::int64_t group = block.index() / tiles % a.groups;
      const std::int64_t sample = block.index() / tiles / a.groups;
      const std::int64_t pixel = block.index() % tiles / across * kProductRows;
      const std::int64_t channel = block.index() % across * kProductColumns;
      TileProduct<decltype(element)>(
          block, s.out * area,
          [&](int i, std::int64_t k) {
            return pixel + i < s.pixels_in
                       ? Through(a, sample, group * s.out + k / area, k % area, pixel + i)
                       : 0.0F;
          },
          [&](std::int64_t k, int j) {
            return channel + j < s.in ? Load(a.w, (group * s.out + k / area) * s.taps +
                                                      (channel + j) * area + k % area)
                                      : 0.0F;
          },
          [&](int i, int j, float sum) {
            if (pixel + i < s.pixels_in && channel + j < s.in) {
              Store(a.x, (sample * a.in + group * s.in + channel + j) * s.pixels_in + pixel + i,
                    sum);
            }
          });
    });
  }
};

// Rows: output channels of a group; columns: taps; depth: (sample, output pixel).
struct ConvWeightGradKernel {
  static constexpr KernelId kId = KernelId::kConvWeightGrad;
  using Args = ConvArgs;
  static constexpr int kThreads = kProductThreads;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    WithType(a.multiply_as, [&](auto element) {
      const ConvShape s = ShapeOf(a);
      const std::int64_t across = Parts(s.taps, kProductColumns);
      const std::int64_t tiles = across * Parts(s.out, kProductRows);
      const std::int64_t group = block.index() / tiles;
      const std::int64_t channel = block.index() % tiles / across * kProductRows;
      const std::int64_t tap = block.index() % across * kProductColumns;
      TileProduct<decltype(element)>(
          block, a.batch * s.pixels_out,
          [&](int i, std::int64_t k) {
            return channel + i < s.out
                       ? Load(a.y, OutputAt(a, k / s.pixels_out, group * s.out + channel + i,
                                            k % s.pixels_out))
                       : 0.0F;
          },
          [&](std::int64_t k, int j) {
            return tap + j < s.taps ? LoadTap(a, k / s.pixels_out * a.in + group * s.in, tap + j,
                                              k % s.pixels_out)
                                    : 0.0F;
          },
          [&](int i, int j, float sum) {
            if (channel + i < s.out && tap + j < s.taps) {
              StoreOrAdd(a.grad, (group * s.out + channel + i) * s.taps + tap + j, sum, a.adds);
            }
          });
    });
  }
};

// A block per output channel.
struct ConvBiasGradKernel {
  static constexpr KernelId kId = KernelId::kConvBiasGrad;
  using Args = ConvArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t pixels = a.height_out * a.width_out;
    PerThread<float> sums;
    block.Each([&](int t) {
      float sum = 0.0F;
      for (std::int64_t i = t; i < a.batch * pixels; i += kThreads) {
        sum += Load(a.y, OutputAt(a, i / pixels, block.index(), i % pixels));
      }
      sums[t] = sum;
    });
    const float total = BlockSum(block, block.Shared<float>(kThreads), sums);
    block.Each([&](int t) {
      if (t == 0) {
        StoreOrAdd(a.grad, block.index(), total, a.adds);
      }
    });
  }
};

// Pools. A window is the part of the input that an output pixel covers.
struct PoolArgs {
  Array x = {}, y = {};  // backward: x is the gradient that is made, y the output's
  std::int64_t planes = 0;
  std::int64_t height = 0, width = 0, height_out = 0, width_out = 0;
  std::int64_t kernel = 0, stride = 0, padding = 0;
  bool is_global = false;          // one window, the whole image
  std::int32_t* places = nullptr;  // of the maxima in their planes
  float average = 1.0F;            // one over the window's size, padding included
};
struct PoolWindow {
  std::int64_t y_begin, y_end, x_begin, x_end;
};
SW_DEVICE PoolWindow WindowOf(const PoolArgs& a, std::int64_t out) {
  if (a.is_global) {
    return {0, a.height, 0, a.width};
  }
  const std::int64_t y = out / a.width_out * a.stride - a.padding;
  const std::int64_t x = out % a.width_out * a.stride - a.padding;
  return {y > 0 ? y : 0, y + a.kernel < a.height ? y + a.kernel : a.height, x > 0 ? x : 0,
          x + a.kernel < a.width ? x + a.kernel : a.width};
}

// The first one of equal maxima, as PyTorch; a thread per output.
struct MaxPoolKernel {
  static constexpr KernelId kId = KernelId::kMaxPool;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t pixels = a.height_out * a.width_out;
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= a.planes * pixels) {
        return;
      }
      const std::int64_t base = i / pixels * a.height * a.width;
      const PoolWindow w = WindowOf(a, i % pixels);
      float largest = -INFINITY;
      std::int64_t place = w.y_begin * a.width + w.x_begin;
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        for (std::int64_t x = w.x_begin; x < w.x_end; ++x) {
          const float value = Load(a.x, base + y * a.width + x);
          if (value > largest || value != value) {
            largest = value;
            place = y * a.width + x;
          }
        }
      }
      Store(a.y, i, largest);
      a.places[i] = static_cast<std::int32_t>(place);
    });
  }
};

// A thread per input pixel sums over the windows that may hold it, in order.
template <class Share>
SW_DEVICE float SumWindows(const PoolArgs& a, std::int64_t pixel, const Share& share) {
  if (a.is_global) {
    return share(0);
  }
  const std::int64_t y = pixel / a.width + a.padding;
  const std::int64_t x = pixel % a.width + a.padding;
  const std::int64_t y_first = y < a.kernel ? 0 : (y - a.kernel) / a.stride + 1;
  const std::int64_t x_first = x < a.kernel ? 0 : (x - a.kernel) / a.stride + 1;
  float sum = 0.0F;
  for (std::int64_t oy = y_first; oy < a.height_out && oy * a.stride <= y; ++oy) {
    for (std::int64_t ox = x_first; ox < a.width_out && ox * a.stride <= x; ++ox) {
      sum += share(oy * a.width_out + ox);
    }
  }
  return sum;
}

struct MaxPoolGradKernel {
  static constexpr KernelId kId = KernelId::kMaxPoolGrad;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t pixels = a.height * a.width;
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= a.planes * pixels) {
        return;
      }
      const std::int64_t outputs = i / pixels * a.height_out * a.width_out;
      Store(a.x, i, SumWindows(a, i % pixels, [&](std::int64_t out) {
              return a.places[outputs + out] == i % pixels ? Load(a.y, outputs + out) : 0.0F;
            }));
    });
  }
};

struct AvgPoolKernel {
  static constexpr KernelId kId = KernelId::kAvgPool;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t pixels = a.height_out * a.width_out;
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= a.planes * pixels) {
        return;
      }
      const std::int64_t base = i / pixels * a.height * a.width;
      const PoolWindow w = WindowOf(a, i % pixels);
      float sum = 0.0F;
      for (std::int64_t y = w.y_begin; y < w.y_end; ++y) {
        for (std::int64_t x = w.x_begin; x < w.x_end; ++x) {
          sum += Load(a.x, base + y * a.width + x);
        }
      }
      Store(a.y, i, sum * a.average);
    });
  }
};

struct AvgPoolGradKernel {
  static constexpr KernelId kId = KernelId::kAvgPoolGrad;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t pixels = a.height * a.width;
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= a.planes * pixels) {
        return;
      }
      const std::int64_t outputs = i / pixels * a.height_out * a.width_out;
      Store(a.x, i, SumWindows(a, i % pixels, [&](std::int64_t out) {
              return Load(a.y, outputs + out) * a.average;
            }));
    });
  }
};

// Batch norm over (batch, plane) of every channel; a block per channel. Keeps means, then inverse
// deviations.
struct BatchNormArgs {
  Array x = {}, y = {}, dx = {}, dy = {}, weight = {}, bias = {}, weight_grad = {}, bias_grad = {};
  bool adds_weight = false, adds_bias = false;
  std::int64_t batch = 0, channels = 0, plane = 0;
  float epsilon = 0.0F;
  bool uses_running = false;  // running statistics instead of the batch's
  float* running = nullptr;   // means, then variances; null: there are none
  float* means = nullptr;
  float* inverses = nullptr;
  // Statistics of several ranks: before the exchange they are written, behind it read.
  bool is_before = false, is_after = false;
  std::int64_t ranks = 1;
  float* exchange = nullptr;  // forward, of each rank: means, squares, the count of elements;
                              // backward: sums of dy xhat, then of dy
  float* count = nullptr;     // of all ranks' elements of a channel
};
SW_DEVICE std::int64_t ElementOf(const BatchNormArgs& a, std::int64_t channel, std::int64_t i) {
  return (i / a.plane * a.channels + channel) * a.plane + i % a.plane;
}

struct BatchNormStatsKernel {
  static constexpr KernelId kId = KernelId::kBatchNormStats;
  using Args = BatchNormArgs;
  static constexpr int kThreads = 256;
  static constexpr float kMomentum = 0.1F;  // PyTorch's share of the new batch

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t channel = block.index();
    double* const scratch = block.Shared<double>(kThreads);
    const std::int64_t n = a.batch * a.plane;
    if (a.is_after) {
      block.Each([&](int t) {
        if (t == 0) {
          Finish(a, channel, Join(a, channel));
        }
      });
      return;
    }
    PerThread<double> sums;
    block.Each([&](int t) {
      double sum = 0.0;
      for (std::int64_t i = t; i < n; i += kThreads) {
        sum += static_cast<double>(Load(a.x, ElementOf(a, channel, i)));
      }
      sums[t] = sum;
    });
    const auto mean = static_cast<float>(BlockSum(block, scratch, sums) / static_cast<double>(n));
    block.Each([&](int t) {
      double sum = 0.0;
      for (std::int64_t i = t; i < n; i += kThreads) {
        const float centered = Load(a.x, ElementOf(a, channel, i)) - mean;
        sum += static_cast<double>(centered * centered);
      }
      sums[t] = sum;
    });
    const double squares = BlockSum(block, scratch, sums);
    block.Each([&](int t) {
      if (t != 0) {
        return;
      }
      if (a.is_before) {
        a.exchange[channel] = mean;
        a.exchange[a.channels + channel] = static_cast<float>(squares);
        a.exchange[2 * a.channels] = static_cast<float>(n);
      } else {
        Finish(a, channel, {static_cast<double>(n), static_cast<double>(mean), squares});
      }
    });
  }

  struct Moments {
    double count, mean, squares;
  };

  // The moments of all ranks together, by Chan, Golub and LeVeque's rule, in the ranks' order.
  static SW_DEVICE Moments Join(const Args& a, std::int64_t channel) {
    Moments all = {0.0, 0.0, 0.0};
    for (std::int64_t r = 0; r < a.ranks; ++r) {
      const float* const part = a.exchange + r * (2 * a.channels + 1);
      const auto count = static_cast<double>(part[2 * a.channels]);
      const double distance = static_cast<double>(part[channel]) - all.mean;
      all.squares += static_cast<double>(part[a.channels + channel]) +
                     distance * distance * all.count * count / (all.count + count);
      all.count += count;
      all.mean += distance * count / all.count;
    }
    return all;
  }

  static SW_DEVICE void Finish(const Args& a, std::int64_t channel, const Moments& moments) {
    if (a.uses_running) {
      a.means[channel] = a.running[channel];
      a.inverses[channel] = 1.0F / sqrtf(a.running[a.channels + channel] + a.epsilon);
      return;
    }
    if (a.running != nullptr) {
      float* const running = a.running + channel;
      running[0] += kMomentum * (static_cast<float>(moments.mean) - running[0]);
      const auto unbiased =
          static_cast<float>(moments.squares / (moments.count > 1.0 ? moments.count - 1.0 : 1.0));
      running[a.channels] += kMomentum * (unbiased - running[a.channels]);
    }
    const auto variance = static_cast<float>(moments.squares / moments.count);
    a.means[channel] = static_cast<float>(moments.mean);
    a.inverses[channel] = 1.0F / sqrtf(variance + a.epsilon);
    if (a.is_after) {
      *a.count = static_cast<float>(moments.count);
    }
  }
};

// A thread per element.
struct BatchNormKernel {
  static constexpr KernelId kId = KernelId::kBatchNorm;
  using Args = BatchNormArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i < a.batch * a.channels * a.plane) {
        const std::int64_t channel = i / a.plane % a.channels;
        const float factor = a.inverses[channel] * Load(a.weight, channel);
        Store(a.y, i, (Load(a.x, i) - a.means[channel]) * factor + Load(a.bias, channel));
      }
    });
  }
};

// dx = weight inverse (dy - mean(dy) - xhat mean(dy xhat)); a block per channel.
struct BatchNormGradKernel {
  static constexpr KernelId kId = KernelId::kBatchNormGrad;
  using Args = BatchNormArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t channel = block.index();
    double* const scratch = block.Shared<double>(kThreads);
    const std::int64_t n = a.batch * a.plane;
    const float mean = a.means[channel];
    const float inverse = a.inverses[channel];
    if (a.is_after) {
      WriteInputGradient(block, a, static_cast<double>(a.exchange[channel]),
                         static_cast<double>(a.exchange[a.channels + channel]),
                         static_cast<double>(*a.count));
      return;
    }
    PerThread<double> sums, products;
    block.Each([&](int t) {
      double sum = 0.0;
      double product = 0.0;
      for (std::int64_t i = t; i < n; i += kThreads) {
        const std::int64_t at = ElementOf(a, channel, i);
        const float dy = Load(a.dy, at);
        sum += static_cast<double>(dy);
        product += static_cast<double>(dy * ((Load(a.x, at) - mean) * inverse));
      }
      sums[t] = sum;
      products[t] = product;
    });
    const double sum = BlockSum(block, scratch, sums);
    const double product = BlockSum(block, scratch, products);
    block.Each([&](int t) {
      if (t == 0 && a.weight_grad.data != nullptr) {
        StoreOrAdd(a.weight_grad, channel, static_cast<float>(product), a.adds_weight);
      }
      if (t == 0 && a.bias_grad.data != nullptr) {
        StoreOrAdd(a.bias_grad, channel, static_cast<float>(sum), a.adds_bias);
      }
      if (t == 0 && a.is_before) {
        a.exchange[channel] = static_cast<float>(product);
        a.exchange[a.channels + channel] = static_cast<float>(sum);
      }
    });
    if (a.dx.data != nullptr && !a.is_before) {
      WriteInputGradient(block, a, product, sum, static_cast<double>(n));
    }
  }

  static SW_DEVICE void WriteInputGradient(Block& block, const Args& a, double product, double sum,
                                           double count) {
    const std::int64_t channel = block.index();
    const float mean = a.means[channel];
    const float inverse = a.inverses[channel];
    const float factor = Load(a.weight, channel) * inverse;
    const auto mean_dy = static_cast<float>(sum / count);
    const auto mean_product = static_cast<float>(product / count);
    block.Each([&](int t) {
      for (std::int64_t i = t; i < a.batch * a.plane; i += kThreads) {
        const std::int64_t at = ElementOf(a, channel, i);
        const float xhat = (Load(a.x, at) - mean) * inverse;
        Store(a.dx, at, factor * (Load(a.dy, at) - mean_dy - xhat * mean_product));
      }
    });
  }
};

// z[channel] = sum over the channel's plane of x y; a block per channel.
struct ChannelScaleGradArgs {
  Array x = {}, y = {}, z = {};
  std::int64_t plane = 0;
};
struct ChannelScaleGradKernel {
  static constexpr KernelId kId = KernelId::kChannelScaleGrad;
  using Args = ChannelScaleGradArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    PerThread<float> sums;
    block.Each([&](int t) {
      float sum = 0.0F;
      for (std::int64_t i = t; i < a.plane; i += kThreads) {
        const std::int64_t at = block.index() * a.plane + i;
        sum += Load(a.x, at) * Load(a.y, at);
      }
      sums[t] = sum;
    });
    const float total = BlockSum(block, block.Shared<float>(kThreads), sums);
    block.Each([&](int t) {
      if (t == 0) {
        Store(a.z, block.index(), total);
      }
    });
  }
};

}  // namespace shardwright::gpu
