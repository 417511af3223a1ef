#pragma once

// Log-softmax, negative log-likelihood, and both in one as cross-entropy. No fp32 copy of the
// logits is ever made.
//
// Example: logits (1, 2, 3), label 2. The log-sum is 3 + log(e^-2 + e^-1 + 1) = 3.408, the loss
// 3.408 - 3 = 0.408, and the gradient softmax - onehot = (0.090, 0.245, -0.335).
//
// Why no copy: 8,192 tokens with a vocabulary of 128,256 are 2.0 GiB of bf16 logits. In fp32 they
// would be 3.9 GiB more, which PyTorch's cross_entropy of float() logits takes.
//
// Passes over the logits: one for the log-sum, which keeps 4 bytes a row, and one for the gradient.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// log_sums[row] = log(sum(exp(x))) over rows of n; a block per row. `y` (null: not wanted) gets x
// minus that.
struct LogSumExpArgs {
  Array x = {}, y = {};
  std::int64_t n = 0;
  float* log_sums = nullptr;
};

// Eight more numbers, `count` of which are there, in a sum of exp(x - largest).
// Example: largest 3 and sum 1.135 (of 1 and 3) meet 5: the sum becomes 1.135 e^-2 + 1 = 1.154, and
// the largest 5. No number overflows, as each exponent is at most 0.
SW_DEVICE void AddExponentials(const Eight& eight, DType dtype, std::int64_t count, float* largest,
                               float* sum) {
  float x[kVector];
  Unpack(eight, dtype, x);
  float now = *largest;
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    now = k < count ? fmaxf(now, x[k]) : now;
  }
  if (now == -INFINITY) {
    return;
  }
  float more = 0.0F;
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    more += k < count ? expf(x[k] - now) : 0.0F;
  }
  *sum = *sum * expf(*largest - now) + more;
  *largest = now;
}

// In one pass: every thread keeps the largest number so far and the sum of exponentials below it.
// The threads' pairs are joined at the end in the same way.
SW_DEVICE float LogSumExpOf(Block& block, const Array& x, std::int64_t first, std::int64_t n) {
  constexpr int kThreads = 256;
  constexpr int kAtOnce = 4;  // vectors whose loads are under way together
  constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;
  float* const scratch = block.Shared<float>(kThreads);
  PerThread<float> maxima, sums;
  block.Each([&](int t) {
    float largest = -INFINITY;
    float sum = 0.0F;
    for (std::int64_t i = std::int64_t{t} * kVector; i < n; i += kAtOnce * kApart) {
      Eight eights[kAtOnce] = {};
      SW_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (i + k * kApart < n) {
          eights[k] = LoadEight(x, first + i + k * kApart, n - i - k * kApart);
        }
      }
      SW_UNROLL
      for (int k = 0; k < kAtOnce; ++k) {
        if (i + k * kApart < n) {
          AddExponentials(eights[k], x.dtype, n - i - k * kApart, &largest, &sum);
        }
      }
    }
    maxima[t] = largest;
    sums[t] = sum;
  });
  const float largest = BlockMax(block, scratch, maxima);
  block.Each([&](int t) {
    // A thread without numbers, or with none but minus infinity, adds nothing.
    sums[t] = maxima[t] == -INFINITY ? sums[t] : sums[t] * expf(maxima[t] - largest);
  });
  return largest + logf(BlockSum(block, scratch, sums));
}

// Forward of a cross-entropy: only the log-sums are kept.
struct LogSumExpKernel : KernelTraits<KernelId::kLogSumExp, LogSumExpArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t row = block.index();
    const float log_sum = LogSumExpOf(block, args.x, row * args.n, args.n);
    block.Each([&](int t) {
      if (t == 0) {
        args.log_sums[row] = log_sum;
      }
    });
  }
};

// Forward of a log-softmax op, whose result the model uses itself.
struct LogSoftmaxKernel : KernelTraits<KernelId::kLogSoftmax, LogSumExpArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t first = block.index() * args.n;
    const float log_sum = LogSumExpOf(block, args.x, first, args.n);
    block.Each([&](int t) {
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.n;
           i += std::int64_t{kThreads} * kVector) {
        float values[kVector];
        Unpack(LoadEight(args.x, first + i, args.n - i), args.x.dtype, values);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          values[k] -= log_sum;
        }
        StoreEight(args.y, first + i, Pack(values, args.y.dtype), args.n - i);
      }
    });
  }
};

// dx = dy - exp(y) * sum(dy).
// Example: y = (-1.386, -0.288), which is P = (0.25, 0.75), and dy = (-1, 0): sum(dy) = -1, so dx =
// (-1 + 0.25, 0 + 0.75) = (-0.75, 0.75).
struct LogSoftmaxGradArgs {
  Array y = {}, dy = {}, dx = {};
  std::int64_t n = 0;
};
struct LogSoftmaxGradKernel : KernelTraits<KernelId::kLogSoftmaxGrad, LogSoftmaxGradArgs, 256> {
  static constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t first = block.index() * args.n;
    PerThread<float> sums;
    block.Each([&](int t) {
      float sum = 0.0F;
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.n; i += kApart) {
        float values[kVector];  // zeros behind the row's end
        Unpack(LoadEight(args.dy, first + i, args.n - i), args.dy.dtype, values);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          sum += values[k];
        }
      }
      sums[t] = sum;
    });
    const float sum = BlockSum(block, block.Shared<float>(kThreads), sums);
    block.Each([&](int t) {
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.n; i += kApart) {
        const Eight ys = LoadEight(args.y, first + i, args.n - i);
        const Eight dys = LoadEight(args.dy, first + i, args.n - i);
        float y[kVector], dy[kVector];
        Unpack(ys, args.y.dtype, y);
        Unpack(dys, args.dy.dtype, dy);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          dy[k] -= expf(y[k]) * sum;
        }
        StoreEight(args.dx, first + i, Pack(dy, args.dx.dtype), args.n - i);
      }
    });
  }
};

// Arguments of the three kernels of a loss, which run in this order:
//
//   LossRowsKernel   partial sums of 256 rows each: losses and labels, in fp64
//   LossSumKernel    the loss, and the factor of each row's share in it
//   LossGradKernel   the gradient of the logits, in backward
//
// Labels below zero, PyTorch's ignore_index -100 among them, take no part. Example: 4 rows, one of
// them with label -100; a mean divides by 3. `scale` is the loss scale of fp16.
struct LossArgs {
  Array x = {};  // logits, or for the negative log-likelihood log-probabilities
  const std::int64_t* labels = nullptr;
  std::int64_t rows = 0, n = 0;
  const float* log_sums = nullptr;  // null: negative log-likelihood
  bool is_mean = true;
  double scale = 1.0;         // of the gradient
  double* partial = nullptr;  // 2 per block: sum of losses, number of labels
  std::int64_t partial_count = 0;
  double* factor = nullptr;  // what a row's share of the loss is multiplied by
  float* loss = nullptr;     // null: only the factor is wanted
  Array dx = {};
  Fault* fault = nullptr;
};

// A label that counts and is in range; others are reported.
SW_DEVICE bool HasLabel(const LossArgs& args, std::int64_t row) {
  const std::int64_t label = args.labels[row];
  if (label >= args.n) {
    Report(args.fault, FaultKind::kLabel, label, args.n);
  }
  return label >= 0 && label < args.n;
}

// partial[block] = the losses and labels of 256 rows.
struct LossRowsKernel : KernelTraits<KernelId::kLossRows, LossArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    PerThread<double> losses, counts;
    block.Each([&](int t) {
      const std::int64_t row = block.index() * kThreads + t;
      double loss = 0.0;
      double count = 0.0;
      if (row < args.rows && HasLabel(args, row)) {
        count = 1.0;
        if (args.loss != nullptr) {
          const double x = Load(args.x, row * args.n + args.labels[row]);
          loss = (args.log_sums != nullptr ? static_cast<double>(args.log_sums[row]) : 0.0) - x;
        }
      }
      losses[t] = loss;
      counts[t] = count;
    });
    double* const scratch = block.Shared<double>(kThreads);
    const double loss = BlockSum(block, scratch, losses);
    const double count = BlockSum(block, scratch, counts);
    block.Each([&](int t) {
      if (t == 0) {
        args.partial[2 * block.index()] = loss;
        args.partial[2 * block.index() + 1] = count;
      }
    });
  }
};

// One block: the loss and the factor. A mean over no labels is 0 / 0, as in PyTorch.
// One thread adds in order: 8,192 rows have 32 partial sums.
struct LossSumKernel : KernelTraits<KernelId::kLossSum, LossArgs, 32> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      if (t != 0) {
        return;
      }
      double loss = 0.0;
      double count = 0.0;
      for (std::int64_t i = 0; i < args.partial_count; ++i) {
        loss += args.partial[2 * i];
        count += args.partial[2 * i + 1];
      }
      const double factor = args.is_mean ? 1.0 / count : 1.0;
      *args.factor = factor;
      if (args.loss != nullptr) {
        *args.loss = static_cast<float>(loss * factor);
      }
    });
  }
};

// dx = (softmax(x) - onehot) * factor, or -onehot * factor without log-sums; a block per row.
// A row without label gets zeros, so the gradient is defined everywhere.
struct LossGradKernel : KernelTraits<KernelId::kLossGrad, LossArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    block.Each([&](int t) {
      const std::int64_t row = block.index();
      const std::int64_t label = args.labels[row];
      const bool counts = label >= 0 && label < args.n;
      const bool reads = counts && args.log_sums != nullptr;
      const auto factor = static_cast<float>(args.scale * *args.factor);
      const float log_sum = reads ? args.log_sums[row] : 0.0F;
      constexpr std::int64_t kApart = std::int64_t{kThreads} * kVector;
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.n; i += kAtOnce * kApart) {
        Eight eights[kAtOnce] = {};
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (reads && i + k * kApart < args.n) {
            eights[k] = LoadEight(args.x, row * args.n + i + k * kApart, args.n - i - k * kApart);
          }
        }
        SW_UNROLL
        for (int k = 0; k < kAtOnce; ++k) {
          if (i + k * kApart < args.n) {
            StoreGrad(args, row, i + k * kApart, eights[k], factor, log_sum);
          }
        }
      }
    });
  }

 private:
  static constexpr int kAtOnce = 2;  // vectors whose loads are under way together

  static SW_DEVICE void StoreGrad(const Args& args, std::int64_t row, std::int64_t i,
                                  const Eight& eight, float factor, float log_sum) {
    const std::int64_t label = args.labels[row];
    const bool counts = label >= 0 && label < args.n;
    float values[kVector];
    Unpack(eight, args.x.dtype, values);
    SW_UNROLL
    for (int k = 0; k < kVector; ++k) {
      const float share = args.log_sums != nullptr ? expf(values[k] - log_sum) : 0.0F;
      values[k] = counts ? (i + k == label ? share - 1.0F : share) * factor : 0.0F;
    }
    StoreEight(args.dx, row * args.n + i, Pack(values, args.dx.dtype), args.n - i);
  }
};

// Evaluation: how many rows have their largest score at their label. Example: scores (0.1, 0.7,
// 0.7) with label 1 are right, as the first of equal scores counts; with label 2 they are wrong.
struct LabelCounts {
  std::int64_t correct = 0, counted = 0;
};
struct LabelArgs {
  Array x = {};  // scores
  const std::int64_t* labels = nullptr;
  std::int64_t rows = 0, n = 0;
  std::uint8_t* verdicts = nullptr;  // by row: 0 the label does not count, 1 wrong, 2 right
  LabelCounts* counts = nullptr;
};

// A score and its place; `none`: the place of no score.
// Place `none` says that no score was taken yet, so the first one wins even if it is -infinity.
struct LargestScore {
  float value = 0.0F;
  std::int64_t place = 0;

  SW_DEVICE void Take(float x, std::int64_t at, std::int64_t none) {
    const bool is_larger = place == none || x > value || (x == value && at < place);
    if (at != none && x == x && is_larger) {
      value = x;
      place = at;
    }
  }
};

// A block per row. The first of equal scores wins; a score that is no number is never the largest,
// unless it is the first, as on the host.
struct LabelRowsKernel : KernelTraits<KernelId::kLabelRows, LabelArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    const std::int64_t first = block.index() * args.n;
    auto* const largest = block.Shared<LargestScore>(kThreads);
    block.Each([&](int t) {
      LargestScore mine{0.0F, args.n};
      for (std::int64_t i = std::int64_t{t} * kVector; i < args.n;
           i += std::int64_t{kThreads} * kVector) {
        float values[kVector];
        Unpack(LoadEight(args.x, first + i, args.n - i), args.x.dtype, values);
        SW_UNROLL
        for (int k = 0; k < kVector; ++k) {
          mine.Take(values[k], i + k < args.n ? i + k : args.n, args.n);
        }
      }
      largest[t] = mine;
    });
    for (int width = kThreads / 2; width > 0; width /= 2) {
      block.Each([&](int t) {
        if (t < width) {
          largest[t].Take(largest[t + width].value, largest[t + width].place, args.n);
        }
      });
    }
    block.Each([&](int t) {
      if (t != 0) {
        return;
      }
      const float x = Load(args.x, first);
      const std::int64_t place = x == x ? largest[0].place : 0;
      const std::int64_t label = args.labels[block.index()];
      args.verdicts[block.index()] = label < 0 ? 0 : (place == label ? 2 : 1);
    });
  }
};

// One block.
struct LabelCountKernel : KernelTraits<KernelId::kLabelCount, LabelArgs, 256> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    PerThread<std::int64_t> correct, counted;
    block.Each([&](int t) {
      std::int64_t right = 0;
      std::int64_t all = 0;
      for (std::int64_t row = t; row < args.rows; row += kThreads) {
        right += args.verdicts[row] == 2 ? 1 : 0;
        all += args.verdicts[row] == 0 ? 0 : 1;
      }
      correct[t] = right;
      counted[t] = all;
    });
    auto* const scratch = block.Shared<std::int64_t>(kThreads);
    const std::int64_t right = BlockSum(block, scratch, correct);
    const std::int64_t all = BlockSum(block, scratch, counted);
    block.Each([&](int t) {
      if (t == 0) {
        *args.counts = {right, all};
      }
    });
  }
};

}  // namespace shardwright::gpu
