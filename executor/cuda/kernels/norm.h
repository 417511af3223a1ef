#pragma once

// Layer norm and RMS norm over rows of features, statistics in fp32; a block per row.
//
// Example of the row (1, 3) with epsilon 0: the mean is 2, the variance 1, and y = (-1, 1). RMS
// norm subtracts no mean: the mean square is 5, the inverse 1 / sqrt 5 = 0.447, and y = (0.447,
// 1.342).
//
// A row of 4,096 bf16 features is read once and written once, 16 KiB in all, which is the least
// that is possible. A longer row does not fit into the registers of a block, and is read once for
// each pass: mean, variance, result.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// y = (x - mean) * inverse * (weight + offset) + bias over rows of n features, where x's rows are
// `stride` elements apart. Keeps inverses, and means if `has_mean`. With an addend, which lies as x
// does, `sum` gets x + addend first, and is what is normalized: as it was rounded.
// Example: 8 tokens with 4 heads of 64, normalized per head, are 32 rows of n = 64. `weight_offset`
// is 1 where a model stores its weights less one.
struct RowNormArgs {
  Array x = {}, y = {}, weight = {}, bias = {};  // bias: null, or added
  Array addend = {}, sum = {};                   // null: x is normalized
  std::int64_t n = 0, stride = 0;
  float weight_offset = 0.0F, epsilon = 0.0F;
  bool has_mean = false;
  float* inverses = nullptr;
  float* means = nullptr;
};

// A thread's vectors of a row are kThreads * kVector features apart. Of rows of up to kKeptFeatures
// they stay in registers from one pass over the row to the next.
// Example: thread 3 holds features 24 to 31 and 2,072 to 2,079. So a warp's vectors are neighbours
// in memory, and 512 bytes of a bf16 row come with one access of the warp.
struct RowShare {
  static constexpr int kThreads = 256;
  static constexpr int kMost = 2;
  static constexpr std::int64_t kKeptFeatures = std::int64_t{kThreads} * kVector * kMost;
  Eight eights[kMost];

  // f(k, i) for every vector k of thread t, which begins at feature i.
  template <bool kKept, class F>
  static SW_DEVICE void Each(std::int64_t n, int t, const F& f) {
    constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;
    if constexpr (kKept) {
      SW_UNROLL
      for (int k = 0; k < kMost; ++k) {
        const std::int64_t i = k * kApart + std::int64_t{t} * kVector;
        if (i < n) {
          f(k, i);
        }
      }
    } else {
      for (std::int64_t i = std::int64_t{t} * kVector; i < n; i += kApart) {
        f(0, i);
      }
    }
  }
};

// Forward. A block makes the sum with the addend, the mean, the variance around it, and the result.
// The variance is the mean of squared distances to the mean, not the difference of two large sums,
// so fp32 suffices: with x = 1,000 +- 1 that difference would be lost in the rounding of 10^6.
struct RowNormKernel : KernelTraits<KernelId::kRowNorm, RowNormArgs, RowShare::kThreads> {
  static constexpr int kMinBlocks = 4;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    if (args.n > RowShare::kKeptFeatures) {
      RunRow<false, false>(block, args);
    } else if (AreHalf(args)) {
      RunRow<true, true>(block, args);
    } else {
      RunRow<true, false>(block, args);
    }
  }

 private:
  static SW_DEVICE bool AreHalf(const Args& args) {
    const bool sums_halves =
        args.addend.data == nullptr || (IsHalf(args.addend.dtype) && IsHalf(args.sum.dtype));
    return IsHalf(args.x.dtype) && IsHalf(args.y.dtype) && sums_halves;
  }

  template <bool kKept, bool kHalf>
  static SW_DEVICE void RunRow(Block& block, const Args& given) {
    Args args = given;
    args.x = Known<kHalf>(given.x);
    args.addend = Known<kHalf>(given.addend);
    args.sum = Known<kHalf>(given.sum);
    args.y = Known<kHalf>(given.y);
    float* const scratch = block.Shared<float>(kThreads);
    const std::int64_t row = block.index();
    const auto count = static_cast<float>(args.n);
    const bool has_sum = args.addend.data != nullptr;
    const Array from = {has_sum ? args.sum.data : args.x.data,
                        has_sum ? args.sum.dtype : args.x.dtype};
    PerThread<RowShare> shares;
    block.Each([&](int t) { Begin<kKept>(args, row, t, shares[t]); });
    const auto share_of = [&](int t, int k, std::int64_t i, float* values) {
      Eight eight{};
      if constexpr (kKept) {
        eight = shares[t].eights[k];
      } else {  // a sum: what this thread has written itself
        eight = LoadEight(from, row * args.stride + i, args.n - i);
      }
      Unpack(eight, from.dtype, values);
    };
    PerThread<float> sums;
    float mean = 0.0F;
    if (args.has_mean) {
      block.Each([&](int t) {
        float sum = 0.0F;
        RowShare::Each<kKept>(args.n, t, [&](int k, std::int64_t i) {
          float x[kVector];
          share_of(t, k, i, x);
          SW_UNROLL
          for (int e = 0; e < kVector; ++e) {
            sum += x[e];  // zeros behind the end of the row
          }
        });
        sums[t] = sum;
      });
      mean = BlockSum(block, scratch, sums) / count;
    }
    block.Each([&](int t) {
      float sum = 0.0F;
      RowShare::Each<kKept>(args.n, t, [&](int k, std::int64_t i) {
        float x[kVector];
        share_of(t, k, i, x);
        SW_UNROLL
        for (int e = 0; e < kVector; ++e) {
          const float centered = i + e < args.n ? x[e] - mean : 0.0F;
          sum += centered * centered;
        }
      });
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
      RowShare::Each<kKept>(args.n, t, [&](int k, std::int64_t i) {
        const Eight weights = LoadEight(args.weight, i, args.n - i);
        float x[kVector], weight[kVector], bias[kVector] = {};
        if (args.bias.data != nullptr) {
          Unpack(LoadEight(args.bias, i, args.n - i), args.bias.dtype, bias);
        }
        Unpack(weights, args.weight.dtype, weight);
        share_of(t, k, i, x);
        SW_UNROLL
        for (int e = 0; e < kVector; ++e) {
          x[e] = (x[e] - mean) * inverse * (weight[e] + args.weight_offset) + bias[e];
        }
        StoreEight(args.y, row * args.n + i, Pack(x, args.y.dtype), args.n - i);
      });
    });
  }

  // Loads the row, and makes the sum that is normalized.
  template <bool kKept>
  static SW_DEVICE void Begin(const Args& args, std::int64_t row, int t, RowShare& share) {
    const bool has_sum = args.addend.data != nullptr;
    if (!kKept && !has_sum) {
      return;
    }
    RowShare addends;
    if constexpr (kKept) {
      RowShare::Each<true>(args.n, t, [&](int k, std::int64_t i) {
        share.eights[k] = LoadEight(args.x, row * args.stride + i, args.n - i);
      });
      if (has_sum) {
        RowShare::Each<true>(args.n, t, [&](int k, std::int64_t i) {
          addends.eights[k] = LoadEight(args.addend, row * args.stride + i, args.n - i);
        });
      }
    }
    if (!has_sum) {
      return;
    }
    RowShare::Each<kKept>(args.n, t, [&](int k, std::int64_t i) {
      const std::int64_t at = row * args.stride + i;
      if constexpr (!kKept) {
        share.eights[k] = LoadEight(args.x, at, args.n - i);
        addends.eights[k] = LoadEight(args.addend, at, args.n - i);
      }
      float x[kVector], addend[kVector];
      Unpack(share.eights[k], args.x.dtype, x);
      Unpack(addends.eights[k], args.addend.dtype, addend);
      SW_UNROLL
      for (int e = 0; e < kVector; ++e) {
        x[e] += addend[e];
      }
      share.eights[k] = Pack(x, args.sum.dtype);  // as it is rounded
      StoreEight(args.sum, at, share.eights[k], args.n - i);
    });
  }
};

// dx = inverse * (s - mean(s) - xhat mean(s xhat)) with s = dy * weight and xhat = (x - mean) *
// inverse; with `adds` on top of what dx holds.
// Example: x = (1, 2, 3), weight 1 and dy = (3, 0, 0). The inverse is 1.225 and xhat = (-1.225, 0,
// 1.225); mean(s) = 1 and mean(s xhat) = -1.225. dx = 1.225 (3 - 1 - 1.5, -1, -1 + 1.5) = (0.61,
// -1.22, 0.61). It sums to 0, as a constant added to x changes nothing.
struct RowNormGradArgs {
  Array x = {}, dy = {}, dx = {}, weight = {};  // weight null: ones
  std::int64_t n = 0, stride = 0;
  float weight_offset = 0.0F;
  const float* inverses = nullptr;
  const float* means = nullptr;  // null: an RMS norm
  bool adds = false;
};

// Backward, a block per row: one pass for the two means, one for dx. The gradients of weight and
// bias are sums over rows and come from sums.h.
struct RowNormGradKernel
    : KernelTraits<KernelId::kRowNormGrad, RowNormGradArgs, RowShare::kThreads> {
  static constexpr int kMinBlocks = 3;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    if (args.n > RowShare::kKeptFeatures) {
      RunRow<false, false>(block, args);
    } else if (AreHalf(args)) {
      RunRow<true, true>(block, args);
    } else {
      RunRow<true, false>(block, args);
    }
  }

 private:
  // xhat and s of eight features.
  struct Numbers {
    float xhat[kVector], scaled[kVector];
  };
  static SW_DEVICE Numbers NumbersOf(const Args& args, const Eight& x, const Eight& dy,
                                     std::int64_t row, std::int64_t i) {
    Numbers numbers;
    float weight[kVector];
    if (args.weight.data != nullptr) {
      Unpack(LoadEight(args.weight, i, args.n - i), args.weight.dtype, weight);
    }
    Unpack(x, args.x.dtype, numbers.xhat);
    Unpack(dy, args.dy.dtype, numbers.scaled);
    const float inverse = args.inverses[row];
    const float mean = args.means != nullptr ? args.means[row] : 0.0F;
    SW_UNROLL
    for (int e = 0; e < kVector; ++e) {
      numbers.scaled[e] *= args.weight.data != nullptr ? weight[e] + args.weight_offset : 1.0F;
      numbers.xhat[e] = (numbers.xhat[e] - mean) * inverse;
    }
    return numbers;
  }

  static SW_DEVICE bool AreHalf(const Args& args) {
    return IsHalf(args.x.dtype) && IsHalf(args.dy.dtype) && IsHalf(args.dx.dtype);
  }

  template <bool kKept, bool kHalf>
  static SW_DEVICE void RunRow(Block& block, const Args& given) {
    Args args = given;
    args.x = Known<kHalf>(given.x);
    args.dy = Known<kHalf>(given.dy);
    args.dx = Known<kHalf>(given.dx);
    float* const scratch = block.Shared<float>(kThreads);
    const std::int64_t row = block.index();
    const auto count = static_cast<float>(args.n);
    PerThread<RowShare> xs, dys;
    PerThread<float> sums, products;
    const auto load = [&](int t, int k, std::int64_t i) {
      xs[t].eights[k] = LoadEight(args.x, row * args.stride + i, args.n - i);
      dys[t].eights[k] = LoadEight(args.dy, row * args.n + i, args.n - i);
    };
    block.Each([&](int t) {
      if constexpr (kKept) {
        RowShare::Each<true>(args.n, t, [&](int k, std::int64_t i) { load(t, k, i); });
      }
      float sum = 0.0F;
      float product = 0.0F;
      RowShare::Each<kKept>(args.n, t, [&](int k, std::int64_t i) {
        if constexpr (!kKept) {
          load(t, k, i);
        }
        const Numbers numbers = NumbersOf(args, xs[t].eights[k], dys[t].eights[k], row, i);
        SW_UNROLL
        for (int e = 0; e < kVector; ++e) {  // dy is zero behind the end of the row
          sum += numbers.scaled[e];
          product += numbers.scaled[e] * numbers.xhat[e];
        }
      });
      sums[t] = sum;
      products[t] = product;
    });
    const float mean_product = BlockSum(block, scratch, products) / count;
    const float mean_scaled = args.means != nullptr ? BlockSum(block, scratch, sums) / count : 0.0F;
    const float inverse = args.inverses[row];
    block.Each([&](int t) {
      RowShare::Each<kKept>(args.n, t, [&](int k, std::int64_t i) {
        const std::int64_t at = row * args.stride + i;
        float dx[kVector] = {};
        if (args.adds) {
          Unpack(LoadEight(args.dx, at, args.n - i), args.dx.dtype, dx);
        }
        if constexpr (!kKept) {
          load(t, k, i);
        }
        const Numbers numbers = NumbersOf(args, xs[t].eights[k], dys[t].eights[k], row, i);
        SW_UNROLL
        for (int e = 0; e < kVector; ++e) {
          dx[e] += inverse * (numbers.scaled[e] - mean_scaled - numbers.xhat[e] * mean_product);
        }
        StoreEight(args.dx, at, Pack(dx, args.dx.dtype), args.n - i);
      });
    });
  }
};

}  // namespace shardwright::gpu
