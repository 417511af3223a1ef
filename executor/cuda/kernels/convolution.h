#pragma once

// Convolutions as matrix products whose operands are gathered on the way. Images are (channels,
// height, width).
//
// Example, the first layer of ResNet: 3 channels of 224 x 224, 64 outputs, kernel 7, stride 2,
// padding 3. The output has 112 x 112 = 12,544 pixels, and each reads 3 x 7 x 7 = 147 taps. The
// product of a sample is (12,544 x 147) times (147 x 64). The left matrix would be 3.5 MiB in bf16;
// here each number of it is looked up in the image when a tile is loaded, so it never exists.
//
// These kernels serve where cuDNN takes no convolution. They are correct, not fast.

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
// Outside of the image lies the padding, zeros.
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
// Example as above: tap 24 is channel 0, row 3, column 3 of the kernel. For output pixel 0 it reads
// image row 0 x 2 + 3 - 3 = 0 and column 0. Tap 8 is row 1, column 1, and reads row -2: 0.
SW_DEVICE float LoadTap(const ConvArgs& a, std::int64_t first_channel, std::int64_t tap,
                        std::int64_t pixel) {
  const std::int64_t area = a.kernel * a.kernel;
  const std::int64_t y = pixel / a.width_out * a.stride + tap % area / a.kernel - a.padding;
  const std::int64_t x = pixel % a.width_out * a.stride + tap % a.kernel - a.padding;
  return LoadImage(a, first_channel + tap / area, y, x);
}

// Rows: output pixels; columns: output channels of a group; depth: taps. Blocks: samples x groups x
// tiles.
struct ConvKernel : KernelTraits<KernelId::kConv, ConvArgs, kProductThreads> {
  static SW_DEVICE void Run(Block& block, const Args& a) {
    WithElement(a.multiply_as, [&](auto element) {
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
struct ConvDataGradKernel : KernelTraits<KernelId::kConvDataGrad, ConvArgs, kProductThreads> {
  // The output's gradient that the input pixel receives through one tap, or 0. Example in one
  // dimension, kernel 3, stride 2, padding 1: input 3 is read by output 2 through tap 0 and by
  // output 1 through tap 2. Through tap 1 it would be output 3 / 2, which does not exist.
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
    WithElement(a.multiply_as, [&](auto element) {
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
// Example: 32 samples of the layer above sum over 401,408 pixels, in 3 blocks only.
struct ConvWeightGradKernel : KernelTraits<KernelId::kConvWeightGrad, ConvArgs, kProductThreads> {
  static SW_DEVICE void Run(Block& block, const Args& a) {
    WithElement(a.multiply_as, [&](auto element) {
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
struct ConvBiasGradKernel : KernelTraits<KernelId::kConvBiasGrad, ConvArgs, 256> {
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

}  // namespace shardwright::gpu
