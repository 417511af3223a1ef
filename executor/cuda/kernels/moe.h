#pragma once

// Mixture of experts: routing, and the experts' projections on the rows that chose them. How many
// rows an expert has is known on the device only, so launches cover the most it could have and
// blocks beyond its rows end at once.

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

// What the chosen scores are divided by, or 1. 1e-20: as Transformers.
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
struct RouteKernel {
  static constexpr KernelId kId = KernelId::kRoute;
  using Args = RouteArgs;
  static constexpr int kThreads = 64;

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
struct RouteGradKernel {
  static constexpr KernelId kId = KernelId::kRouteGrad;
  using Args = RouteArgs;
  static constexpr int kThreads = 64;

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
struct RouterGradArgs {
  const float* logit_grads = nullptr;  // (rows, experts)
  Array x = {};                        // (rows, in); the weight's gradient only
  Array w = {};                        // (experts, in); the input's gradient only
  Array grad = {};
  std::int64_t rows = 0, experts = 0, in = 0;
  bool adds = false;
};

// grad = logit_grads w. A warp has 256 columns of four rows.
struct RouterInputGradKernel {
  static constexpr KernelId kId = KernelId::kRouterInputGrad;
  using Args = RouterGradArgs;
  static constexpr int kThreads = 256;
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
struct RouterWeightGradKernel {
  static constexpr KernelId kId = KernelId::kRouterWeightGrad;
  using Args = RouterGradArgs;
  static constexpr int kThreads = 256;
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

// Rows by expert: expert e has list[offsets[e]] .. list[offsets[e + 1] - 1], ascending; slots[row *
// experts + e] is the place of (row, e) in the list, or -1. Three kernels: a block per expert
// counts its rows, one block adds up, a block per expert lists.
struct DispatchArgs {
  Array weights = {};  // (rows, experts); 0: not chosen
  std::int64_t rows = 0, experts = 0;
  bool is_dense = false;  // every expert gets every row
  std::int64_t* offsets = nullptr;
  std::int64_t* list = nullptr;
  std::int64_t* slots = nullptr;
};
SW_DEVICE bool Takes(const DispatchArgs& a, std::int64_t row, std::int64_t e) {
  return a.is_dense || Load(a.weights, row * a.experts + e) != 0.0F;
}

// offsets[e + 1] = rows of expert e.
struct DispatchCountKernel {
  static constexpr KernelId kId = KernelId::kDispatchCount;
  using Args = DispatchArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    auto* const scratch = block.Shared<std::int64_t>(kThreads);
    const std::int64_t e = block.index();
    PerThread<std::int64_t> counts;
    block.Each([&](int t) {
      std::int64_t count = 0;
      for (std::int64_t row = t; row < a.rows; row += kThreads) {
        count += Takes(a, row, e) ? 1 : 0;
      }
      counts[t] = count;
    });
    const std::int64_t sum = BlockSum(block, scratch, counts);
    block.Each([&](int t) {
      if (t == 0) {
        a.offsets[e + 1] = sum;
      }
    });
  }
};

// Counts become offsets.
struct DispatchOffsetsKernel {
  static constexpr KernelId kId = KernelId::kDispatchOffsets;
  using Args = DispatchArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    auto* const counts = block.Shared<std::int64_t>(kThreads);
    std::int64_t sum = 0;  // of thread 0
    for (std::int64_t first = 0; first < a.experts; first += kThreads) {
      block.Each([&](int t) { counts[t] = first + t < a.experts ? a.offsets[first + t + 1] : 0; });
      block.Each([&](int t) {
        for (int i = 0; t == 0 && i < kThreads; ++i) {
          sum += counts[i];
          counts[i] = sum;
        }
      });
      block.Each([&](int t) {
        if (first + t < a.experts) {
          a.offsets[first + t + 1] = counts[t];
        }
      });
    }
    block.Each([&](int t) {
      if (t == 0) {
        a.offsets[0] = 0;
      }
    });
  }
};

// Each thread lists a stretch of rows, whose first place is behind those of the threads before.
struct DispatchKernel {
  static constexpr KernelId kId = KernelId::kDispatch;
  using Args = DispatchArgs;
  static constexpr int kThreads = 256;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    auto* const places = block.Shared<std::int64_t>(kThreads);
    const std::int64_t e = block.index();
    const std::int64_t stretch = (a.rows + kThreads - 1) / kThreads;
    block.Each([&](int t) {
      std::int64_t count = 0;
      for (std::int64_t row = t * stretch; row < (t + 1) * stretch && row < a.rows; ++row) {
        count += Takes(a, row, e) ? 1 : 0;
      }
      places[t] = count;
    });
    block.Each([&](int t) {
      std::int64_t place = t == 0 ? a.offsets[e] : 0;
      for (int i = 0; t == 0 && i < kThreads; ++i) {
        const std::int64_t count = places[i];
        places[i] = place;
        place += count;
      }
    });
    block.Each([&](int t) {
      std::int64_t place = places[t];
      for (std::int64_t row = t * stretch; row < (t + 1) * stretch && row < a.rows; ++row) {
        const bool takes = Takes(a, row, e);
        a.slots[row * a.experts + e] = takes ? place : -1;
        if (takes) {
          a.list[place++] = row;
        }
      }
    });
  }
};

inline constexpr int kMostExperts = 128;  // whose parameters a launch can name

// Products of the routed rows with every expert's matrix: c[slot] (+)= a[slot or its row] (k) times
// w_e. Blocks: experts x tiles of the most rows one expert can have.
struct ExpertGemmArgs {
  std::int64_t experts = 0, first_expert = 0, most_rows = 0;
  std::int64_t n = 0, k = 0;
  const std::int64_t* offsets = nullptr;
  const std::int64_t* list = nullptr;  // null: row `slot` of a; else row list[slot]
  Array a = {}, c = {};                // rows of k and of n
  const void* weights[kMostExperts] = {};
  DType weight_dtype = DType::kFp32;
  std::int64_t weight_row = 0, weight_column = 0;  // strides: element (k, n)
  bool adds = false;
  DType multiply_as = DType::kFp32;
};
struct ExpertGemmKernel {
  static constexpr KernelId kId = KernelId::kExpertGemm;
  using Args = ExpertGemmArgs;
  static constexpr int kThreads = kProductThreads;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& args) {
    const std::int64_t across = (args.n + kProductColumns - 1) / kProductColumns;
    const std::int64_t tiles = across * ((args.most_rows + kProductRows - 1) / kProductRows);
    const std::int64_t e = block.index() / tiles;
    const std::int64_t expert = args.first_expert + e;
    const std::int64_t begin = args.offsets[expert];
    const std::int64_t count = args.offsets[expert + 1] - begin;
    const std::int64_t row = block.index() % tiles / across * kProductRows;
    const std::int64_t column = block.index() % across * kProductColumns;
    if (row >= count) {
      return;
    }
    const Array weight{const_cast<void*>(args.weights[e]), args.weight_dtype};
    TileProduct<T>(
        block, args.k,
        [&](int i, std::int64_t k) {
          if (row + i >= count) {
            return 0.0F;
          }
          const std::int64_t slot = begin + row + i;
          return Load(args.a, (args.list != nullptr ? args.list[slot] : slot) * args.k + k);
        },
        [&](std::int64_t k, int j) {
          return column + j < args.n
                     ? Load(weight, k * args.weight_row + (column + j) * args.weight_column)
                     : 0.0F;
        },
        [&](int i, int j, float sum) {
          if (row + i < count && column + j < args.n) {
            StoreOrAdd(args.c, (begin + row + i) * args.n + column + j, sum, args.adds);
          }
        });
  }
};

// The gradient of every expert's matrix (n, k): sum over its slots of left[slot][n] right[slot or
// row][k].
struct ExpertWeightGemmArgs {
  std::int64_t experts = 0, first_expert = 0, n = 0, k = 0;
  const std::int64_t* offsets = nullptr;
  const std::int64_t* list = nullptr;  // of `right`; null: by slot
  const std::int64_t* left_list = nullptr;
  const float* left_factor = nullptr;  // by slot; null: 1
  Array left = {}, right = {};
  void* grads[kMostExperts] = {};  // null: not wanted
  bool adds[kMostExperts] = {};
  DType grad_dtype = DType::kFp32;
  DType multiply_as = DType::kFp32;
};
struct ExpertWeightGemmKernel {
  static constexpr KernelId kId = KernelId::kExpertWeightGemm;
  using Args = ExpertWeightGemmArgs;
  static constexpr int kThreads = kProductThreads;

  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& args) {
    const std::int64_t across = (args.k + kProductColumns - 1) / kProductColumns;
    const std::int64_t tiles = across * ((args.n + kProductRows - 1) / kProductRows);
    const std::int64_t e = block.index() / tiles;
    const std::int64_t begin = args.offsets[args.first_expert + e];
    const std::int64_t count = args.offsets[args.first_expert + e + 1] - begin;
    const std::int64_t row = block.index() % tiles / across * kProductRows;
    const std::int64_t column = block.index() % across * kProductColumns;
    if (args.grads[e] == nullptr) {
      return;
    }
    TileProduct<T>(
        block, count,
        [&](int i, std::int64_t slot) {
          if (row + i >= args.n) {
            return 0.0F;
          }
          const std::int64_t at = begin + slot;
          const float factor = args.left_factor != nullptr ? args.left_factor[at] : 1.0F;
          return factor *
                 Load(args.left,
                      (args.left_list != nullptr ? args.left_list[at] : at) * args.n + row + i);
        },
        [&](std::int64_t slot, int j) {
          const std::int64_t at = begin + slot;
          return column + j < args.k
                     ? Load(args.right,
                            (args.list != nullptr ? args.list[at] : at) * args.k + column + j)
                     : 0.0F;
        },
        [&](int i, int j, float sum) {
          if (row + i < args.n && column + j < args.k) {
            StoreOrAdd({args.grads[e], args.grad_dtype}, (row + i) * args.k + column + j, sum,
                       args.adds[e]);
          }
        });
  }
};

// Between the projections, by slot: hidden = f(gate) up, or f(up) without a gate.
struct ExpertHiddenArgs {
  Activation activation = Activation::kSilu;
  bool gated = false;
  std::int64_t experts = 0, out = 0, most_slots = 0;
  const std::int64_t* offsets = nullptr;
  Array up = {}, gate = {};  // (slots, out), what forward keeps
  float* hidden = nullptr;
  // Backward: the gradient of hidden times the routing weight goes in, those of up (in place) and
  // gate come out, and the gradient of the routing weight.
  float* hidden_grad = nullptr;
  float* gate_grad = nullptr;
  const std::int64_t* list = nullptr;
  Array weights = {}, weights_grad = {};  // (rows, experts)
  float* slot_weights = nullptr;          // by slot: its routing weight, for the products behind
};

// The expert that slot `slot` belongs to, or -1 behind the last.
SW_DEVICE std::int64_t ExpertOf(const std::int64_t* offsets, std::int64_t experts,
                                std::int64_t slot) {
  std::int64_t low = 0;
  std::int64_t high = experts;
  if (slot >= offsets[experts]) {
    return -1;
  }
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (offsets[middle] <= slot ? low : high) = middle;
  }
  return low;
}

// A block per slot.
struct ExpertHiddenKernel {
  static constexpr KernelId kId = KernelId::kExpertHidden;
  using Args = ExpertHiddenArgs;
  static constexpr int kThreads = 128;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    const std::int64_t slot = block.index();
    if (slot >= a.offsets[a.experts]) {
      return;
    }
    block.Each([&](int t) {
      for (std::int64_t i = slot * a.out + t; i < (slot + 1) * a.out; i += kThreads) {
        const float up = Load(a.up, i);
        a.hidden[i] =
            a.gated ? Activate(a.activation, Load(a.gate, i)) * up : Activate(a.activation, up);
      }
    });
  }
};

struct ExpertHiddenGradKernel {
  static constexpr KernelId kId = KernelId::kExpertHiddenGrad;
  using Args = ExpertHiddenArgs;
  static constexpr int kThreads = 128;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    float* const scratch = block.Shared<float>(kThreads);
    const std::int64_t slot = block.index();
    const std::int64_t expert = ExpertOf(a.offsets, a.experts, slot);
    if (expert < 0) {
      return;
    }
    const std::int64_t at = a.list[slot] * a.experts + expert;
    const float weight = Load(a.weights, at);
    PerThread<float> dots;
    block.Each([&](int t) {
      float dot = 0.0F;
      for (std::int64_t i = slot * a.out + t; i < (slot + 1) * a.out; i += kThreads) {
        dot += a.hidden_grad[i] * a.hidden[i];
      }
      dots[t] = dot;
    });
    const float dot = BlockSum(block, scratch, dots);
    block.Each([&](int t) {
      if (t == 0) {
        a.slot_weights[slot] = weight;
        if (a.weights_grad.data != nullptr) {
          Store(a.weights_grad, at, dot);
        }
      }
      for (std::int64_t i = slot * a.out + t; i < (slot + 1) * a.out; i += kThreads) {
        const float grad = a.hidden_grad[i] * weight;
        const float up = Load(a.up, i);
        if (!a.gated) {
          a.hidden_grad[i] =
              ActivateGrad(a.activation, KeepsResult(a.activation) ? a.hidden[i] : up, grad);
          continue;
        }
        const float gate = Load(a.gate, i);
        const float activated = Activate(a.activation, gate);
        a.gate_grad[i] =
            ActivateGrad(a.activation, KeepsResult(a.activation) ? activated : gate, grad * up);
        a.hidden_grad[i] = grad * activated;
      }
    });
  }
};

// to[row] = sum over the row's experts, in order, of y[slot], times the routing weight where
// `weights` are given.
struct ExpertCombineArgs {
  const float* y = nullptr;  // (slots, in)
  const std::int64_t* slots = nullptr;
  Array weights = {};  // null: 1
  Array to = {};
  std::int64_t rows = 0, experts = 0, in = 0;
};
struct ExpertCombineKernel {
  static constexpr KernelId kId = KernelId::kExpertCombine;
  using Args = ExpertCombineArgs;
  static constexpr int kThreads = 128;

  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t row = block.index();
      for (std::int64_t i = t; i < a.in; i += kThreads) {
        float sum = 0.0F;
        for (std::int64_t e = 0; e < a.experts; ++e) {
          const std::int64_t slot = a.slots[row * a.experts + e];
          if (slot >= 0) {
            const float weight =
                a.weights.data != nullptr ? Load(a.weights, row * a.experts + e) : 1.0F;
            sum += weight * a.y[slot * a.in + i];
          }
        }
        Store(a.to, row * a.in + i, sum);
      }
    });
  }
};

}  // namespace shardwright::gpu
