#pragma once

// The router of a mixture of experts: who takes a row, with what weight.
//
// Example: logits (2, 1, 0, 1), two experts per token, softmax. Scores are (0.534, 0.197, 0.072,
// 0.197). Experts 0 and 1 are chosen, the first of equals. With `normalizes` their scores are
// divided by 0.731: weights (0.731, 0.269, 0, 0). Zeros mark experts that are not chosen, for
// experts.h.
//
// DeepSeek V3 scores by sigmoid, and adds a correction per expert for the choice only: the weight
// is still the plain score. So the correction balances the load and has no gradient.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "executor/cuda/kernels/tile.h"

namespace shardwright::gpu {

struct RouteArgs {
  std::int64_t rows = 0, experts = 0, per_token = 0, groups = 1, groups_per_token = 0;
  bool by_sigmoid = false, normalizes = false;
  float factor = 1.0F;
  float* scores = nullptr;            // (rows, experts): logits before, scores afterwards
  std::int32_t* chosen = nullptr;     // (rows, per_token)
  float* choice = nullptr;            // scratch (rows, experts)
  float* group_scores = nullptr;      // scratch (rows, groups)
  const float* correction = nullptr;  // added for the choice only; null: none
  Array weights = {};                 // (rows, experts); backward: its gradient
  float* logit_grads = nullptr;       // backward's result
};

SW_DEVICE std::int64_t LargestOf(const float* values, std::int64_t begin, std::int64_t end) {
  std::int64_t best = begin;
  for (std::int64_t i = begin + 1; i < end; ++i) {
    best = values[i] > values[best] ? i : best;
  }
  return best;
}

// Only experts of the groups with the largest sums of their two best scores remain (DeepSeek).
// Example: 8 experts in 4 groups with sums 1.5, 0.9, 1.2 and 0.9, two groups per token. Group 3
// goes first, then group 1; experts 0, 1, 4 and 5 remain. NaN marks a group that is gone.
SW_DEVICE void KeepBestGroups(const RouteArgs& a, float* choice, float* group_scores) {
  const std::int64_t size = a.experts / a.groups;
  for (std::int64_t g = 0; g < a.groups; ++g) {
    const std::int64_t best = LargestOf(choice, g * size, (g + 1) * size);
    float second = -INFINITY;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) {
      second = e != best && choice[e] > second ? choice[e] : second;
    }
    group_scores[g] = choice[best] + (size > 1 ? second : 0.0F);
  }
  for (std::int64_t dropped = a.groups - a.groups_per_token; dropped > 0; --dropped) {
    std::int64_t worst = -1;  // the last of the smallest goes first, so that ties keep the first
    for (std::int64_t g = 0; g < a.groups; ++g) {
      const bool is_left = group_scores[g] == group_scores[g];
      if (is_left && (worst < 0 || group_scores[g] <= group_scores[worst])) {
        worst = g;
      }
    }
    group_scores[worst] = NAN;
    for (std::int64_t e = worst * size; e < (worst + 1) * size; ++e) {
      choice[e] = -INFINITY;
    }
  }
}

// Divisor of the chosen scores: their sum, or 1 without normalization. 1e-20: as Transformers.
SW_DEVICE float ScoreSum(const RouteArgs& a, const float* scores, const std::int32_t* chosen) {
  if (!a.normalizes) {
    return 1.0F;
  }
  float sum = a.by_sigmoid ? 1e-20F : 0.0F;
  for (std::int64_t i = 0; i < a.per_token; ++i) {
    sum += scores[chosen[i]];
  }
  return sum;
}

// Logits become scores in place: sigmoids, or a softmax in fp32.
SW_DEVICE void ScoreRow(const RouteArgs& a, float* scores) {
  if (a.by_sigmoid) {
    for (std::int64_t e = 0; e < a.experts; ++e) {
      scores[e] = Sigmoid(scores[e]);
    }
    return;
  }
  const float largest = scores[LargestOf(scores, 0, a.experts)];
  float sum = 0.0F;
  for (std::int64_t e = 0; e < a.experts; ++e) {
    scores[e] = expf(scores[e] - largest);
    sum += scores[e];
  }
  for (std::int64_t e = 0; e < a.experts; ++e) {
    scores[e] *= 1.0F / sum;
  }
}

// A thread per row.
// Cost: O(experts per_token) for each row, all by one thread; 256 experts and 8 per token are 2,048
// comparisons, small beside the experts' products.
struct RouteKernel : KernelTraits<KernelId::kRoute, RouteArgs, 64> {
  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t row = block.index() * kThreads + t;
      if (row >= a.rows) {
        return;
      }
      float* const scores = a.scores + row * a.experts;
      float* const choice = a.choice + row * a.experts;
      std::int32_t* const chosen = a.chosen + row * a.per_token;
      ScoreRow(a, scores);
      for (std::int64_t e = 0; e < a.experts; ++e) {
        choice[e] = scores[e] + (a.correction != nullptr ? a.correction[e] : 0.0F);
        Store(a.weights, row * a.experts + e, 0.0F);
      }
      if (a.groups_per_token > 0 && a.groups_per_token < a.groups) {
        KeepBestGroups(a, choice, a.group_scores + row * a.groups);
      }
      for (std::int64_t i = 0; i < a.per_token; ++i) {
        const std::int64_t best = LargestOf(choice, 0, a.experts);
        chosen[i] = static_cast<std::int32_t>(best);
        choice[best] = -INFINITY;
      }
      const float factor = a.factor / ScoreSum(a, scores, chosen);
      for (std::int64_t i = 0; i < a.per_token; ++i) {
        Store(a.weights, row * a.experts + chosen[i], scores[chosen[i]] * factor);
      }
    });
  }
};

// weight = factor score / sum: d score = factor (dy - [normalized] dot(dy, score) / sum); then
// through the scores' function.
// Example of softmax scores (0.6, 0.4), one expert per token, not normalized, factor 1, dy = (1,
// 0): d score = (1, 0), dot = 0.6, and d logits = (0.6 (1 - 0.6), 0.4 (0 - 0.6)) = (0.24, -0.24).
struct RouteGradKernel : KernelTraits<KernelId::kRouteGrad, RouteArgs, 64> {
  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t row = block.index() * kThreads + t;
      if (row >= a.rows) {
        return;
      }
      const float* const scores = a.scores + row * a.experts;
      const std::int32_t* const chosen = a.chosen + row * a.per_token;
      float* const result = a.logit_grads + row * a.experts;
      const float sum = ScoreSum(a, scores, chosen);
      float mean = 0.0F;
      for (std::int64_t i = 0; i < a.per_token && a.normalizes; ++i) {
        mean += Load(a.weights, row * a.experts + chosen[i]) * scores[chosen[i]] / sum;
      }
      for (std::int64_t e = 0; e < a.experts; ++e) {
        result[e] = 0.0F;
      }
      float dot = 0.0F;
      for (std::int64_t i = 0; i < a.per_token; ++i) {
        const float dy = Load(a.weights, row * a.experts + chosen[i]);
        result[chosen[i]] = a.factor / sum * (dy - mean);
        dot += result[chosen[i]] * scores[chosen[i]];
      }
      for (std::int64_t e = 0; e < a.experts; ++e) {
        result[e] = a.by_sigmoid ? result[e] * scores[e] * (1.0F - scores[e])
                                 : scores[e] * (result[e] - dot);
      }
    });
  }
};

// The gradients of a router's input and weight from those of its logits, which stay in fp32. Both
// products are long and as narrow as there are experts.
// Example: 16,384 rows, 64 experts, 2,048 features. The input's gradient is (16,384 x 64) times (64
// x 2,048); the weight's is (64 x 16,384) times (16,384 x 2,048). Both are bound by reading x or
// writing dx, 64 MiB in bf16, so plain multiply-adds suffice.
struct RouterGradArgs {
  const float* logit_grads = nullptr;  // (rows, experts)
  Array x = {};                        // (rows, in); the weight's gradient only
  Array w = {};                        // (experts, in); the input's gradient only
  Array grad = {};
  std::int64_t rows = 0, experts = 0, in = 0;
  bool adds = false;
};

// grad = logit_grads w. A warp has 256 columns of four rows.
// A block has 32 rows and 256 columns. A loaded weight is used for 4 rows.
struct RouterInputGradKernel : KernelTraits<KernelId::kRouterInputGrad, RouterGradArgs, 256> {
  static constexpr int kRows = 4;  // of a thread
  static constexpr int kBlockRows = kRows * kThreads / kWarp;
  static constexpr int kColumns = kWarp * kVector;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t tiles = (a.in + kColumns - 1) / kColumns;
    block.Each([&](int t) {
      const std::int64_t first = block.index() / tiles * kBlockRows + t / kWarp * kRows;
      const std::int64_t column = block.index() % tiles * kColumns + t % kWarp * kVector;
      if (column >= a.in) {
        return;
      }
      float sums[kRows][kVector] = {};
      for (std::int64_t e = 0; e < a.experts; ++e) {
        const Eight eight = LoadEight(a.w, e * a.in + column, a.in - column);
        float grads[kRows];
        SW_UNROLL
        for (int r = 0; r < kRows; ++r) {
          grads[r] = first + r < a.rows ? a.logit_grads[(first + r) * a.experts + e] : 0.0F;
        }
        float w[kVector];
        Unpack(eight, a.w.dtype, w);
        SW_UNROLL
        for (int i = 0; i < kRows * kVector; ++i) {
          sums[i / kVector][i % kVector] += grads[i / kVector] * w[i % kVector];
        }
      }
      SW_UNROLL
      for (int r = 0; r < kRows; ++r) {
        if (first + r < a.rows) {
          StoreEight(a.grad, (first + r) * a.in + column, Pack(sums[r], a.grad.dtype),
                     a.in - column);
        }
      }
    });
  }
};

// grad (+)= logit_grads^T x. A block has four experts and 64 columns, eight of its threads every
// 32nd row; their sums are added in order.
// Shared memory: 32 rows x 4 experts x 64 columns x 4 bytes = 32 KiB.
struct RouterWeightGradKernel : KernelTraits<KernelId::kRouterWeightGrad, RouterGradArgs, 256> {
  static constexpr int kExperts = 4, kColumns = 64;
  static constexpr int kRows = kThreads * kVector / kColumns;  // at once
  static constexpr int kShared = kRows * kExperts * kColumns;  // floats

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t tiles = (a.in + kColumns - 1) / kColumns;
    const std::int64_t first_expert = block.index() / tiles * kExperts;
    const std::int64_t first_column = block.index() % tiles * kColumns;
    auto* const shared = block.Shared<float>(kShared);
    block.Each([&](int t) {
      const int row = t * kVector / kColumns;
      const int place = t * kVector % kColumns;
      float sums[kExperts][kVector] = {};
      if (first_column + place < a.in) {
        if (IsHalf(a.x.dtype)) {
          SumOwnRows<true>(a, row, first_expert, first_column + place, sums);
        } else {
          SumOwnRows<false>(a, row, first_expert, first_column + place, sums);
        }
      }
      SW_UNROLL
      for (int i = 0; i < kExperts * kVector; ++i) {
        shared[(row * kExperts + i / kVector) * kColumns + place + i % kVector] =
            sums[i / kVector][i % kVector];
      }
    });
    static_assert(kThreads == kExperts * kColumns);
    block.Each([&](int t) {
      const std::int64_t expert = first_expert + t / kColumns;
      const std::int64_t column = first_column + t % kColumns;
      if (expert < a.experts && column < a.in) {
        float sum = 0.0F;
        for (int row = 0; row < kRows; ++row) {
          sum += shared[row * kThreads + t];
        }
        StoreOrAdd(a.grad, expert * a.in + column, sum, a.adds);
      }
    });
  }

 private:
  template <bool kHalf>
  static SW_DEVICE void SumOwnRows(const Args& a, int first_row, std::int64_t expert,
                                   std::int64_t column, float (&sums)[kExperts][kVector]) {
    constexpr int kAtOnce = kHalf ? 4 : 2;  // rows whose loads are under way together
    const Array x = Known<kHalf>(a.x);
    for (std::int64_t first = first_row; first < a.rows; first += std::int64_t{kAtOnce} * kRows) {
      Eight xs[kAtOnce] = {};
      float grads[kAtOnce][kExperts] = {};
      SW_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        const std::int64_t row = first + std::int64_t{r} * kRows;
        if (row < a.rows) {
          xs[r] = LoadEight(x, row * a.in + column, a.in - column);
          SW_UNROLL
          for (int e = 0; e < kExperts; ++e) {
            grads[r][e] =
                expert + e < a.experts ? a.logit_grads[row * a.experts + expert + e] : 0.0F;
          }
        }
      }
      SW_UNROLL
      for (int r = 0; r < kAtOnce; ++r) {
        float values[kVector];
        Unpack(xs[r], x.dtype, values);
        SW_UNROLL
        for (int i = 0; i < kExperts * kVector; ++i) {
          sums[i / kVector][i % kVector] += grads[r][i / kVector] * values[i % kVector];
        }
      }
    }
  }
};

}  // namespace shardwright::gpu
