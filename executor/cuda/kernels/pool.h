#pragma once

// Pools of images, (planes, height, width).
//
// Example, ResNet's pool: kernel 3, stride 2, padding 1, 112 x 112 to 56 x 56. In one dimension
// output 5 reads inputs 9, 10 and 11, and output 0 reads 0 and 1, as -1 is padding. Input 9 lies in
// the windows of outputs 4 and 5, so its gradient is a sum over up to 2 x 2 windows.
//
// Backward goes by input, not by output: each thread sums over the windows that hold its input. So
// no two threads write to one place, and no atomics are needed.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

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

// Calls f with an element of what is read and, as a type, the windows' side where it is 2 or 3.
// Loops over such windows are unrolled, so that all of a window is loaded before any is used. Else
// the side is 0.
template <class F>
SW_DEVICE void WithPool(const PoolArgs& a, DType dtype, const F& f) {
  WithElement(dtype, [&](auto element) {
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
// In place of a missing row or column stands the nearest one, so that all are loaded without a
// branch. Example as above: output 0 has rows (0, 0, 1), where the first stands for -1 and has_row
// is false. Loads from address 0 twice cost less than a branch for each load.
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
// Candidates are the last kSide outputs that begin at or before the input. Example: input 9 asks
// for outputs 3, 4 and 5; the window of 3 ends at input 7, so has_row is false there.
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

// Body of each pool kernel: a thread per pixel that it makes, typed and for known windows.
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
// `places` keeps the winner of each window for backward: PyTorch keeps the same indices. A NaN
// wins, and of several NaN the last.
struct MaxPoolKernel : KernelTraits<KernelId::kMaxPool, PoolArgs, 256> {
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
struct MaxPoolGradKernel : KernelTraits<KernelId::kMaxPoolGrad, PoolArgs, 256> {
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

// The divisor is the window's full size, padding included, as PyTorch's count_include_pad: with
// kernel 3 a corner with 4 inputs is divided by 9.
struct AvgPoolKernel : KernelTraits<KernelId::kAvgPool, PoolArgs, 256> {
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

// Each input gets 1 / 9 of the gradient of each window that holds it (kernel 3).
struct AvgPoolGradKernel : KernelTraits<KernelId::kAvgPoolGrad, PoolArgs, 256> {
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

}  // namespace shardwright::gpu
