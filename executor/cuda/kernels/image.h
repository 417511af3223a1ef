#pragma once

// Convolutions as matrix products whose operands are gathered on the way, pools, batch norm,
// products per channel. Images are (channels, height, width).

#include <cmath>
#include <cstdint>
#include <type_traits>

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

// Calls f with an element of what is read and, as a type, the windows' side where it is 2 or 3:
// then loops over windows are unrolled, so that all of a window is loaded before any is used. Else
// the side is 0.
template <class F>
SW_DEVICE void WithPool(const PoolArgs& a, DType dtype, const F& f) {
  WithType(dtype, [&](auto element) {
    if (a.kernel == 3 && !a.is_global) {
      f(element, std::integral_constant<int, 3>());
    } else if (a.kernel == 2 && !a.is_global) {
      f(element, std::integral_constant<int, 2>());
    } else {
      f(element, std::integral_constant<int, 0>());
    }
  });
}

// Pixel `pixel` of plane `plane`, of an image of rows of `width`. One of 2^31 pixels or more would
// not fit.
struct PoolPixel {
  std::int64_t plane;
  int pixel, y, x;
};
SW_DEVICE PoolPixel PixelOf(std::int64_t i, std::int64_t pixels, std::int64_t width) {
  const std::int64_t plane = i / pixels;
  const auto pixel = static_cast<unsigned>(i - plane * pixels);
  const unsigned row = pixel / static_cast<unsigned>(width);
  return {plane, static_cast<int>(pixel), static_cast<int>(row),
          static_cast<int>(pixel - row * static_cast<unsigned>(width))};
}

// Rows and columns of a window's inputs, or of the outputs whose windows hold an input, in order.
// Those that are not there are the nearest ones that are, so that all are loaded without a branch.
template <int kSide>
struct PoolTaps {
  int rows[kSide], columns[kSide];
  bool has_row[kSide], has_column[kSide];
};
SW_DEVICE int Nearest(int place, std::int64_t end) {
  const int last = static_cast<int>(end) - 1;
  return place < 0 ? 0 : (place < last ? place : last);
}
template <int kSide>
SW_DEVICE PoolTaps<kSide> InputsOf(const PoolArgs& a, const PoolPixel& out) {
  PoolTaps<kSide> taps;
  SW_UNROLL
  for (int k = 0; k < kSide; ++k) {
    const int y = out.y * static_cast<int>(a.stride) - static_cast<int>(a.padding) + k;
    const int x = out.x * static_cast<int>(a.stride) - static_cast<int>(a.padding) + k;
    taps.rows[k] = Nearest(y, a.height);
    taps.columns[k] = Nearest(x, a.width);
    taps.has_row[k] = taps.rows[k] == y;
    taps.has_column[k] = taps.columns[k] == x;
  }
  return taps;
}
template <int kSide>
SW_DEVICE PoolTaps<kSide> OutputsOf(const PoolArgs& a, const PoolPixel& in) {
  const auto stride = static_cast<int>(a.stride);
  const int y = in.y + static_cast<int>(a.padding), x = in.x + static_cast<int>(a.padding);
  PoolTaps<kSide> taps;
  SW_UNROLL
  for (int k = 0; k < kSide; ++k) {
    const int row = y / stride - (kSide - 1) + k, column = x / stride - (kSide - 1) + k;
    taps.rows[k] = Nearest(row, a.height_out);
    taps.columns[k] = Nearest(column, a.width_out);
    taps.has_row[k] = (taps.rows[k] == row) & (row * stride + kSide > y);
    taps.has_column[k] = (taps.columns[k] == column) & (column * stride + kSide > x);
  }
  return taps;
}
// Calls f(k, place, is_there) with each of them; places in images of rows of `width`.
template <int kSide, class F>
SW_DEVICE void EachTap(const PoolTaps<kSide>& taps, std::int64_t width, const F& f) {
  SW_UNROLL
  for (int k = 0; k < kSide * kSide; ++k) {
    const int row = k / kSide, column = k % kSide;
    f(k, taps.rows[row] * static_cast<int>(width) + taps.columns[column],
      taps.has_row[row] & taps.has_column[column]);
  }
}

// The same for sides that are not known: calls f(place) with those that are there.
template <class F>
SW_DEVICE void EachInput(const PoolArgs& a, const PoolPixel& out, const F& f) {
  const auto height = static_cast<int>(a.height), width = static_cast<int>(a.width);
  const int top = out.y * static_cast<int>(a.stride) - static_cast<int>(a.padding);
  const int left = out.x * static_cast<int>(a.stride) - static_cast<int>(a.padding);
  const int bottom = a.is_global ? height : top + static_cast<int>(a.kernel);
  const int right = a.is_global ? width : left + static_cast<int>(a.kernel);
  for (int y = top > 0 ? top : 0; y < bottom && y < height; ++y) {
    for (int x = left > 0 ? left : 0; x < right && x < width; ++x) {
      f(y * width + x);
    }
  }
}
template <class F>
SW_DEVICE void EachOutput(const PoolArgs& a, const PoolPixel& in, const F& f) {
  if (a.is_global) {
    return f(0);
  }
  const auto height = static_cast<int>(a.height_out), width = static_cast<int>(a.width_out);
  const auto stride = static_cast<int>(a.stride), kernel = static_cast<int>(a.kernel);
  const int y = in.y + static_cast<int>(a.padding), x = in.x + static_cast<int>(a.padding);
  const int top = y < kernel ? 0 : (y - kernel) / stride + 1;
  const int left = x < kernel ? 0 : (x - kernel) / stride + 1;
  for (int oy = top; oy < height && oy * stride <= y; ++oy) {
    for (int ox = left; ox < width && ox * stride <= x; ++ox) {
      f(oy * width + ox);
    }
  }
}

// What a kernel of pools does: a thread per pixel that it makes, typed and for known windows.
template <class Kernel>
SW_DEVICE void RunPool(Block& block, const PoolArgs& a, bool makes_inputs) {
  const std::int64_t width = makes_inputs ? a.width : a.width_out;
  const std::int64_t pixels = width * (makes_inputs ? a.height : a.height_out);
  WithPool(a, makes_inputs ? a.y.dtype : a.x.dtype, [&](auto element, auto side) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * Kernel::kThreads + t;
      if (i < a.planes * pixels) {
        const PoolPixel pixel = PixelOf(i, pixels, width);
        Kernel::template One<decltype(element), decltype(side)::value>(a, i, pixel);
      }
    });
  });
}

// The first one of equal maxima, as PyTorch; a thread per output.
struct MaxPoolKernel {
  static constexpr KernelId kId = KernelId::kMaxPool;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    RunPool<MaxPoolKernel>(block, a, false);
  }

  template <class T, int kSide>
  static SW_DEVICE void One(const Args& a, std::int64_t i, const PoolPixel& out) {
    const T* const image = static_cast<const T*>(a.x.data) + out.plane * a.height * a.width;
    float largest = -INFINITY;
    int place = -1;
    const auto take = [&](T element, int at) {
      const float value = ToFloat(element);
      if (place < 0 || value > largest || value != value) {
        largest = value;
        place = at;
      }
    };
    if constexpr (kSide > 0) {
      // An input that stands for one that is not there is of the window, too.
      T window[kSide * kSide];
      const PoolTaps<kSide> taps = InputsOf<kSide>(a, out);
      EachTap(taps, a.width, [&](int k, int at, bool) { window[k] = image[at]; });
      EachTap(taps, a.width, [&](int k, int at, bool) { take(window[k], at); });
    } else {
      EachInput(a, out, [&](int at) { take(image[at], at); });
    }
    Store(a.y, i, largest);
    a.places[i] = place;
  }
};

// A thread per input sums over the windows that hold it, in order.
struct MaxPoolGradKernel {
  static constexpr KernelId kId = KernelId::kMaxPoolGrad;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    RunPool<MaxPoolGradKernel>(block, a, true);
  }

  template <class T, int kSide>
  static SW_DEVICE void One(const Args& a, std::int64_t i, const PoolPixel& in) {
    const std::int64_t outputs = in.plane * a.height_out * a.width_out;
    const T* const dy = static_cast<const T*>(a.y.data) + outputs;
    const std::int32_t* const places = a.places + outputs;
    float sum = 0.0F;
    if constexpr (kSide > 0) {
      std::int32_t maxima[kSide * kSide];
      T shares[kSide * kSide];
      const PoolTaps<kSide> taps = OutputsOf<kSide>(a, in);
      EachTap(taps, a.width_out, [&](int k, int at, bool) {
        maxima[k] = places[at];
        shares[k] = dy[at];
      });
      EachTap(taps, a.width_out, [&](int k, int, bool is_there) {
        sum += is_there & (maxima[k] == in.pixel) ? ToFloat(shares[k]) : 0.0F;
      });
    } else {
      EachOutput(a, in, [&](int at) { sum += places[at] == in.pixel ? ToFloat(dy[at]) : 0.0F; });
    }
    Store(a.x, i, sum);
  }
};

struct AvgPoolKernel {
  static constexpr KernelId kId = KernelId::kAvgPool;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    RunPool<AvgPoolKernel>(block, a, false);
  }

  template <class T, int kSide>
  static SW_DEVICE void One(const Args& a, std::int64_t i, const PoolPixel& out) {
    const T* const image = static_cast<const T*>(a.x.data) + out.plane * a.height * a.width;
    float sum = 0.0F;
    if constexpr (kSide > 0) {
      T window[kSide * kSide];
      const PoolTaps<kSide> taps = InputsOf<kSide>(a, out);
      EachTap(taps, a.width, [&](int k, int at, bool) { window[k] = image[at]; });
      EachTap(taps, a.width,
              [&](int k, int, bool is_there) { sum += is_there ? ToFloat(window[k]) : 0.0F; });
    } else {
      EachInput(a, out, [&](int at) { sum += ToFloat(image[at]); });
    }
    Store(a.y, i, sum * a.average);
  }
};

struct AvgPoolGradKernel {
  static constexpr KernelId kId = KernelId::kAvgPoolGrad;
  using Args = PoolArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    RunPool<AvgPoolGradKernel>(block, a, true);
  }

  template <class T, int kSide>
  static SW_DEVICE void One(const Args& a, std::int64_t i, const PoolPixel& in) {
    const T* const dy = static_cast<const T*>(a.y.data) + in.plane * a.height_out * a.width_out;
    float sum = 0.0F;
    if constexpr (kSide > 0) {
      T shares[kSide * kSide];
      const PoolTaps<kSide> taps = OutputsOf<kSide>(a, in);
      EachTap(taps, a.width_out, [&](int k, int at, bool) { shares[k] = dy[at]; });
      EachTap(taps, a.width_out, [&](int k, int, bool is_there) {
        sum += is_there ? ToFloat(shares[k]) * a.average : 0.0F;
      });
    } else {
      EachOutput(a, in, [&](int at) { sum += ToFloat(dy[at]) * a.average; });
    }
    Store(a.x, i, sum);
  }
};

// Batch norm over (batch, plane) of every channel; a block per channel, of many threads, since
// there may be fewer channels than multiprocessors. Keeps means, then inverse deviations.
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

// Eight neighbours of a channel's plane, or what is left of it, of which `count` are there: part i
// of all parts of the channel, whose number is below 2^32.
struct PlanePart {
  std::int64_t at, count;
};
SW_DEVICE std::int64_t PlaneParts(const BatchNormArgs& a) {
  return (a.plane + kVector - 1) / kVector;
}
SW_DEVICE PlanePart PartOf(const BatchNormArgs& a, std::int64_t channel, std::int64_t i) {
  const auto parts = static_cast<std::uint32_t>(PlaneParts(a));
  const std::uint32_t sample = static_cast<std::uint32_t>(i) / parts;
  const std::int64_t first = std::int64_t{kVector} * (static_cast<std::uint32_t>(i) % parts);
  return {(sample * a.channels + channel) * a.plane + first,
          sample < a.batch ? a.plane - first : 0};
}
// Elements that are not there are zeros.
SW_DEVICE Eight LoadPart(const Array& array, const PlanePart& part) {
  return part.count > 0 ? LoadEight(array, part.at, part.count) : Eight{};
}

struct BatchNormStatsKernel {
  static constexpr KernelId kId = KernelId::kBatchNormStats;
  using Args = BatchNormArgs;
  static constexpr int kThreads = 512;
  static constexpr float kMomentum = 0.1F;  // PyTorch's share of the new batch

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t channel = block.index();
    double* const scratch = block.Shared<double>(kThreads);
    if (a.uses_running && !a.is_before) {
      block.Each([&](int t) {
        if (t == 0) {
          Finish(a, channel, {});
        }
      });
      return;
    }
    if (a.is_after) {
      block.Each([&](int t) {
        if (t == 0) {
          Finish(a, channel, Join(a, channel));
        }
      });
      return;
    }
    PerThread<double> sums, squares;
    block.Each([&](int t) {
      if (IsHalf(a.x.dtype)) {
        AddOwn<true>(a, channel, t, &sums[t], &squares[t]);
      } else {
        AddOwn<false>(a, channel, t, &sums[t], &squares[t]);
      }
    });
    const auto n = static_cast<double>(a.batch * a.plane);
    const double sum = BlockSum(block, scratch, sums);
    const double mean = sum / n;
    const double centered = BlockSum(block, scratch, squares) - sum * mean;
    const Moments moments = {n, mean, centered < 0.0 ? 0.0 : centered};
    block.Each([&](int t) {
      if (t != 0) {
        return;
      }
      if (a.is_before) {
        a.exchange[channel] = static_cast<float>(mean);
        a.exchange[a.channels + channel] = static_cast<float>(moments.squares);
        a.exchange[2 * a.channels] = static_cast<float>(n);
      } else {
        Finish(a, channel, moments);
      }
    });
  }

 private:
  struct Moments {
    double count, mean, squares;
  };

  // The thread's numbers and their squares; in fp64 the sum of squares gives the variance.
  template <bool kHalf>
  static SW_DEVICE void AddOwn(const Args& a, std::int64_t channel, int t, double* sum,
                               double* squares) {
    constexpr int kAtOnce = kHalf ? 8 : 4;  // vectors whose loads are under way together
    const Array x = Known<kHalf>(a.x);
    for (std::int64_t i = t; i < a.batch * PlaneParts(a); i += std::int64_t{kAtOnce} * kThreads) {
      Eight eights[kAtOnce];
      SW_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        eights[k] = LoadPart(x, PartOf(a, channel, i + std::int64_t{k} * kThreads));
      }
      SW_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        float values[kVector];
        Unpack(eights[k], x.dtype, values);
        SW_UNROLL
        for (int j = 0; j < kVector; ++j) {
          const auto value = static_cast<double>(values[j]);
          *sum += value;
          *squares += value * value;
        }
      }
    }
  }

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

// A thread per part of a plane.
struct BatchNormKernel {
  static constexpr KernelId kId = KernelId::kBatchNorm;
  using Args = BatchNormArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE std::int64_t Items(const Args& a) {
    return a.batch * a.channels * PlaneParts(a);
  }

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= Items(a)) {
        return;
      }
      const std::int64_t plane = i / PlaneParts(a);
      const std::int64_t first = (i - plane * PlaneParts(a)) * kVector;
      const std::int64_t at = plane * a.plane + first;
      const Eight eight = LoadEight(a.x, at, a.plane - first);
      const std::int64_t channel = plane % a.channels;
      const float mean = a.means[channel];
      const float factor = a.inverses[channel] * Load(a.weight, channel);
      const float bias = Load(a.bias, channel);
      float values[kVector];
      Unpack(eight, a.x.dtype, values);
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        values[k] = (values[k] - mean) * factor + bias;
      }
      StoreEight(a.y, at, Pack(values, a.y.dtype), a.plane - first);
    });
  }
};

// dx = weight inverse (dy - mean(dy) - xhat mean(dy xhat)); a block per channel.
struct BatchNormGradKernel {
  static constexpr KernelId kId = KernelId::kBatchNormGrad;
  using Args = BatchNormArgs;
  static constexpr int kThreads = 512;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const bool are_half =
        IsHalf(a.x.dtype) && IsHalf(a.dy.dtype) && (a.dx.data == nullptr || IsHalf(a.dx.dtype));
    if (are_half) {
      RunAs<true>(block, a);
    } else {
      RunAs<false>(block, a);
    }
  }

 private:
  template <bool kHalf>
  static SW_DEVICE void RunAs(Block& block, const Args& a) {
    const std::int64_t channel = block.index();
    if (a.is_after) {
      WriteInputGradient<kHalf>(block, a, static_cast<double>(a.exchange[channel]),
                                static_cast<double>(a.exchange[a.channels + channel]),
                                static_cast<double>(*a.count));
      return;
    }
    double* const scratch = block.Shared<double>(kThreads);
    PerThread<double> sums, products;
    EachPart<kHalf>(block, a, [&](int t, const PlanePart&, const float* x, const float* dy) {
      float sum = 0.0F, product = 0.0F;
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        sum += dy[k];
        product += dy[k] * x[k];
      }
      sums[t] += static_cast<double>(sum);
      products[t] += static_cast<double>(product);
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
      WriteInputGradient<kHalf>(block, a, product, sum, static_cast<double>(a.batch * a.plane));
    }
  }

  // Calls f with every part of the channel: xhat and dy, zeros where there is none.
  template <bool kHalf, class F>
  static SW_DEVICE void EachPart(Block& block, const Args& a, const F& f) {
    constexpr int kAtOnce = kHalf ? 4 : 2;  // vectors of each whose loads are under way together
    const Array x = Known<kHalf>(a.x), dy = Known<kHalf>(a.dy);
    const std::int64_t channel = block.index();
    const float mean = a.means[channel];
    const float inverse = a.inverses[channel];
    block.Each([&](int t) {
      for (std::int64_t i = t; i < a.batch * PlaneParts(a); i += std::int64_t{kAtOnce} * kThreads) {
        PlanePart parts[kAtOnce];
        Eight xs[kAtOnce], dys[kAtOnce];
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          parts[k] = PartOf(a, channel, i + std::int64_t{k} * kThreads);
          xs[k] = LoadPart(x, parts[k]);
          dys[k] = LoadPart(dy, parts[k]);
        }
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          float xhats[kVector], grads[kVector];
          Unpack(xs[k], x.dtype, xhats);
          Unpack(dys[k], dy.dtype, grads);
          SW_UNROLL
          for (int j = 0; j < kVector; ++j) {
            xhats[j] = (xhats[j] - mean) * inverse;
          }
          f(t, parts[k], xhats, grads);
        }
      }
    });
  }

  template <bool kHalf>
  static SW_DEVICE void WriteInputGradient(Block& block, const Args& a, double product, double sum,
                                           double count) {
    const float factor = Load(a.weight, block.index()) * a.inverses[block.index()];
    const auto mean_dy = static_cast<float>(sum / count);
    const auto mean_product = static_cast<float>(product / count);
    const Array dx = Known<kHalf>(a.dx);
    EachPart<kHalf>(block, a, [&](int, const PlanePart& part, const float* x, const float* dy) {
      float values[kVector];
      SW_UNROLL
      for (int k = 0; k < kVector; ++k) {
        values[k] = factor * (dy[k] - mean_dy - x[k] * mean_product);
      }
      if (part.count > 0) {
        StoreEight(dx, part.at, Pack(values, dx.dtype), part.count);
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
