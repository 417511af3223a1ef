#pragma once

// Batch norm of images, (channels, height, width).
//
// Example of one channel with the numbers 0, 2, 4, 6: the mean is 3, the sum of squared distances
// 20, the variance 5. y = (x - 3) / sqrt 5. The running variance learns the unbiased 20 / 3
// instead, as PyTorch's does.
//
// With ranks that share their statistics (SyncBatchNorm) three kernels and one all-gather run: each
// rank writes its mean, squares and count (`is_before`), and reads those of all (`is_after`). Rank
// 0 holds 0 and 2: mean 1, squares 2. Rank 1 holds 4 and 6: mean 5, squares 2. Joined: squares 2 +
// 2 + 4^2 x 2 x 2 / 4 = 20, mean 1 + 4 x 2 / 4 = 3, the numbers above.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// Batch norm over (batch, plane) of every channel; a block per channel, of many threads, since
// there may be fewer channels than multiprocessors. Keeps means, then inverse deviations.
// `exchange` holds 2 C + 1 numbers a rank in forward: 64 channels, 129 numbers. In backward it
// holds 2 C sums, which an all-reduce adds up over the ranks.
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
// Example: a plane of 7 x 7 = 49 elements has 7 parts, the last of one element. With a batch of 32
// a channel has 224 parts; part 8 is elements 8 to 15 of sample 1.
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

// Mean and inverse deviation of each channel, and the running statistics. The sums are fp64: with x
// = 1,000 +- 1, sum of squares less sum times mean loses 6 digits, of which fp64 has 16 and fp32
// has 7.
struct BatchNormStatsKernel : KernelTraits<KernelId::kBatchNormStats, BatchNormArgs, 512> {
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
struct BatchNormKernel : KernelTraits<KernelId::kBatchNorm, BatchNormArgs, 256> {
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
// weight_grad = sum(dy xhat) and bias_grad = sum(dy) come from the same pass over x and dy. A
// second pass writes dx, unless other ranks' sums are needed first (`is_before`).
struct BatchNormGradKernel : KernelTraits<KernelId::kBatchNormGrad, BatchNormArgs, 512> {
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

}  // namespace shardwright::gpu
