#pragma once

// Layer norm and RMS norm over rows of features, statistics in fp32; a block per row.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// y = (x - mean) * inverse * (weight + offset) + bias over rows of n features, where x's rows are
// `stride` elements apart. Keeps inverses, and means if `has_mean`. With an addend, which lies as x
// does, `sum` gets x + addend first, and is what is normalized: as it was rounded.
struct RowNormArgs {
  Array x = {}, y = {}, weight = {}, bias = {};  // bias: null, or added
  Array addend = {}, sum = {};                   // null: x is normalized
  std::int64_t n = 0, stride = 0;
  float weight_offset = 0.0F, epsilon = 0.0F;
  bool has_mean = false;
  float* inverses = nullptr;
  float* means = nullptr;
};

struct RowNormKernel {
  static constexpr KernelId kId = KernelId::kRowNorm;
  using Args = RowNormArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    float* const scratch = block.Shared<float>(kThreads);
    const std::int64_t row = block.index();
    const auto count = static_cast<float>(args.n);
    Array from = args.x;
    if (args.addend.data != nullptr) {
      block.Each([&](int t) {  // every thread reads again what it has written itself
        for (std::int64_t i = t; i < args.n; i += kThreads) {
          const std::int64_t at = row * args.stride + i;
          Store(args.sum, at, Load(args.x, at) + Load(args.addend, at));
        }
      });
      from = args.sum;
    }
    PerThread<float> sums;
    float mean = 0.0F;
    if (args.has_mean) {
      block.Each([&](int t) {
        float sum = 0.0F;
        for (std::int64_t i = t; i < args.n; i += kThreads) {
          sum += Load(from, row * args.stride + i);
        }
        sums[t] = sum;
      });
      mean = BlockSum(block, scratch, sums) / count;
    }
    block.Each([&](int t) {
      float sum = 0.0F;
      for (std::int64_t i = t; i < args.n; i += kThreads) {
        const float centered = Load(from, row * args.stride + i) - mean;
        sum += centered * centered;
      }
      sums[t] = sum;
    });
    const float variance = BlockSum(block, scratch, sums) / count;
    const float inverse = 1.0F / sqrtf(variance + args.epsilon);
    block.Each([&](int t) {
      if (t == 0) {
        args.inverses[row] = inverse;
        if (args.has_mean) {
          args.means[row] = mean;
        }
      }
      for (std::int64_t i = t; i < args.n; i += kThreads) {
        const float weight = Load(args.weight, i) + args.weight_offset;
        const float bias = args.bias.data != nullptr ? Load(args.bias, i) : 0.0F;
        const float x = Load(from, row * args.stride + i);
        Store(args.y, row * args.n + i, (x - mean) * inverse * weight + bias);
      }
    });
  }
};

// dx = inverse * (s - mean(s) - xhat mean(s xhat)) with s = dy * weight and xhat = (x - mean) *
// inverse; with `adds` on top of what dx holds.
struct RowNormGradArgs {
  Array x = {}, dy = {}, dx = {}, weight = {};  // weight null: ones
  std::int64_t n = 0, stride = 0;
  float weight_offset = 0.0F;
  const float* inverses = nullptr;
  const float* means = nullptr;  // null: an RMS norm
  bool adds = false;
};

struct RowNormGradKernel {
  static constexpr KernelId kId = KernelId::kRowNormGrad;
  using Args = RowNormGradArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE float Scaled(const Args& args, std::int64_t row, std::int64_t i) {
    const float weight =
        args.weight.data != nullptr ? Load(args.weight, i) + args.weight_offset : 1.0F;
    return Load(args.dy, row * args.n + i) * weight;
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    float* const scratch = block.Shared<float>(kThreads);
    const std::int64_t row = block.index();
    const float inverse = args.inverses[row];
    const float mean = args.means != nullptr ? args.means[row] : 0.0F;
    const auto count = static_cast<float>(args.n);
    PerThread<float> sums, products;
    block.Each([&](int t) {
      float sum = 0.0F;
      float product = 0.0F;
      for (std::int64_t i = t; i < args.n; i += kThreads) {
        const float scaled = Scaled(args, row, i);
        sum += scaled;
        product += scaled * ((Load(args.x, row * args.stride + i) - mean) * inverse);
      }
      sums[t] = sum;
      products[t] = product;
    });
    const float mean_product = BlockSum(block, scratch, products) / count;
    const float mean_scaled = args.means != nullptr ? BlockSum(block, scratch, sums) / count : 0.0F;
    block.Each([&](int t) {
      for (std::int64_t i = t; i < args.n; i += kThreads) {
        const std::int64_t at = row * args.stride + i;
        const float xhat = (Load(args.x, at) - mean) * inverse;
        const float before = args.adds ? Load(args.dx, at) : 0.0F;
        Store(args.dx, at,
              before + inverse * (Scaled(args, row, i) - mean_scaled - xhat * mean_product));
      }
    });
  }
};

}  // namespace shardwright::gpu
