#pragma once

// The experts' projections on the rows that chose them. How many rows an expert has is known on the
// device only, so launches cover the most it could have and blocks beyond its rows end at once.
//
// Example of the lists: 4 rows, 3 experts; row 0 chose experts 0 and 2, row 1 chose 2, row 2 chose
// 0 and 1, row 3 chose 2.
//   offsets   0, 2, 3, 6            slots 0 and 1 are expert 0's, 2 is 1's, 3 to 5 are 2's
//   list      0, 2, 2, 0, 1, 3      the row of each slot
//   slots     row 0: 0, -1, 3       the slot of each pair of row and expert
//
// Forward runs: the three dispatch kernels, products with the gate and up matrices, hidden, the
// product with the down matrix, combine. Rows are in ascending order in each list, so every sum
// over slots has one order.
//
// Why not ask the device for the counts: the host would wait for the router in each layer, and
// could not run ahead. Example: 4,096 rows and 8 experts with 2 per row. A launch covers 8 x 4,096
// slots, of which 8,192 exist, so three of four blocks end after reading two offsets.

#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/kernels/kernel_id.h"
#include "executor/cuda/kernels/tile.h"
#include "executor/cuda/kernels/wide_tile.h"

namespace shardwright::gpu {

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
struct DispatchCountKernel : KernelTraits<KernelId::kDispatchCount, DispatchArgs, 256> {
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
// Example: counts 2, 1, 3 become 2, 3, 6 behind the leading 0. One thread adds, 256 experts at a
// time.
struct DispatchOffsetsKernel : KernelTraits<KernelId::kDispatchOffsets, DispatchArgs, 256> {
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
// Example: 4,096 rows are stretches of 16. A first pass counts each stretch, thread 0 turns counts
// into first places, a second pass writes.
struct DispatchKernel : KernelTraits<KernelId::kDispatch, DispatchArgs, 256> {
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

// Parts of (rows, columns) that a block each makes.
// Example: 4,096 rows by 14,336 columns in bf16 are 32 x 224 = 7,168 tiles of 128 x 64.
[[nodiscard]] constexpr std::int64_t ExpertTiles(DType multiply_as, std::int64_t rows,
                                                 std::int64_t columns) {
  return multiply_as == DType::kFp32
             ? CeilDiv(rows, kProductRows) * CeilDiv(columns, kProductColumns)
             : CeilDiv(rows, kWideRows) * CeilDiv(columns, kWideColumns);
}
[[nodiscard]] constexpr std::int64_t ExpertShared(DType multiply_as) {
  return multiply_as == DType::kFp32 ? ProductShared<float>() : WideShared();
}

// CUDA allows 4 KiB of arguments on every GPU, of which 128 pointers are 1 KiB. Models with more
// experts are launched in groups, from first_expert on.
inline constexpr int kMostExperts = 128;  // whose parameters a launch can name

// Products of the routed rows with every expert's matrix: c[slot] (+)= a[slot or its row] (k) times
// w_e. Blocks: experts x tiles of the most rows one expert can have, of ExpertTiles results.
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
struct ExpertGemmKernel : KernelTraits<KernelId::kExpertGemm, ExpertGemmArgs, kProductThreads> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  // A part of one expert's product. Parts of equal columns follow one another, so that a matrix is
  // read once.
  struct Part {
    std::int64_t expert, begin, count;  // its slots
    std::int64_t row, column;
  };
  static SW_DEVICE Part PartOf(const Block& block, const Args& args, int rows, int columns) {
    const std::int64_t down = (args.most_rows + rows - 1) / rows;
    const std::int64_t tiles = down * ((args.n + columns - 1) / columns);
    const std::int64_t e = block.index() / tiles, tile = block.index() % tiles;
    const std::int64_t begin = args.offsets[args.first_expert + e];
    return {e, begin, args.offsets[args.first_expert + e + 1] - begin, tile % down * rows,
            tile / down * columns};
  }

  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& args) {
    constexpr bool kIsWide = sizeof(T) == 2;
    const Part part = PartOf(block, args, kIsWide ? kWideRows : kProductRows,
                             kIsWide ? kWideColumns : kProductColumns);
    if (part.row >= part.count) {
      return;
    }
    const auto store = [&](int i, int j, float sum) {
      if (part.row + i < part.count && part.column + j < args.n) {
        StoreOrAdd(args.c, (part.begin + part.row + i) * args.n + part.column + j, sum, args.adds);
      }
    };
    const Array weight{const_cast<void*>(args.weights[part.expert]), args.weight_dtype};
    if constexpr (kIsWide) {
      const Lines left{args.a, part.begin, part.count, args.k, args.list};
      if (args.weight_row == 1) {
        WideProduct<T, false, false>(block, part.row, part.column, args.k, left,
                                     {weight, 0, args.n, args.k}, store);
      } else {
        WideProduct<T, false, true>(block, part.row, part.column, args.k, left,
                                    {weight, 0, args.k, args.n}, store);
      }
    } else {
      Narrow<T>(block, args, part, weight, store);
    }
  }

  template <class T, class Store>
  static SW_DEVICE void Narrow(Block& block, const Args& args, const Part& part,
                               const Array& weight, const Store& store) {
    TileProduct<T>(
        block, args.k,
        [&](int i, std::int64_t k) {
          if (part.row + i >= part.count) {
            return 0.0F;
          }
          const std::int64_t slot = part.begin + part.row + i;
          return Load(args.a, (args.list != nullptr ? args.list[slot] : slot) * args.k + k);
        },
        [&](std::int64_t k, int j) {
          return part.column + j < args.n
                     ? Load(weight, k * args.weight_row + (part.column + j) * args.weight_column)
                     : 0.0F;
        },
        store);
  }
};

// The gradient of every expert's matrix (n, k): sum over its slots of left[slot][n] right[slot or
// row][k].
// The depth of this product is the number of slots, which differs by expert; an expert without rows
// gets zeros, or keeps its gradient with `adds`.
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
struct ExpertWeightGemmKernel
    : KernelTraits<KernelId::kExpertWeightGemm, ExpertWeightGemmArgs, kProductThreads> {
  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& args) {
    constexpr bool kIsWide = sizeof(T) == 2;
    constexpr int kRows = kIsWide ? kWideRows : kProductRows;
    constexpr int kColumns = kIsWide ? kWideColumns : kProductColumns;
    const std::int64_t across = (args.k + kColumns - 1) / kColumns;
    const std::int64_t tiles = across * ((args.n + kRows - 1) / kRows);
    const std::int64_t e = block.index() / tiles;
    const std::int64_t begin = args.offsets[args.first_expert + e];
    const std::int64_t count = args.offsets[args.first_expert + e + 1] - begin;
    const std::int64_t row = block.index() % tiles / across * kRows;
    const std::int64_t column = block.index() % across * kColumns;
    if (args.grads[e] == nullptr) {
      return;
    }
    const Lines left{args.left, begin, count, args.n, args.left_list, args.left_factor};
    const Lines right{args.right, begin, count, args.k, args.list};
    const auto store = [&](int i, int j, float sum) {
      if (row + i < args.n && column + j < args.k) {
        StoreOrAdd({args.grads[e], args.grad_dtype}, (row + i) * args.k + column + j, sum,
                   args.adds[e]);
      }
    };
    if constexpr (kIsWide) {
      WideProduct<T, true, true>(block, row, column, count, left, right, store);
    } else {
      Narrow<T>(block, count, row, column, left, right, store);
    }
  }

  template <class T, class Store>
  static SW_DEVICE void Narrow(Block& block, std::int64_t count, std::int64_t row,
                               std::int64_t column, const Lines& left, const Lines& right,
                               const Store& store) {
    const auto one = [](const Lines& from, std::int64_t slot, std::int64_t place) {
      const std::int64_t at = from.first + slot;
      return place < from.length
                 ? Load(from.array,
                        (from.list != nullptr ? from.list[at] : at) * from.length + place)
                 : 0.0F;
    };
    TileProduct<T>(
        block, count,
        [&](int i, std::int64_t slot) { return left.Factor(slot) * one(left, slot, row + i); },
        [&](std::int64_t slot, int j) { return one(right, slot, column + j); }, store);
  }
};

// Between the projections, by slot: hidden = f(gate) up, or f(up) without a gate.
// Example with SiLU: gate 2 and up 3 give hidden = 1.762 x 3 = 5.285.
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
struct ExpertHiddenKernel : KernelTraits<KernelId::kExpertHidden, ExpertHiddenArgs, 128> {
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

// A block per slot: the gradient of the routing weight is the dot product of hidden and its
// gradient; the other gradients come from the second pass over the slot's features.
struct ExpertHiddenGradKernel : KernelTraits<KernelId::kExpertHiddenGrad, ExpertHiddenArgs, 128> {
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
// Example: row 0 above is weight 0.7 times slot 0 plus 0.3 times slot 3.
struct ExpertCombineArgs {
  const float* y = nullptr;  // (slots, in)
  const std::int64_t* slots = nullptr;
  Array weights = {};  // null: 1
  Array to = {};
  std::int64_t rows = 0, experts = 0, in = 0;
};
struct ExpertCombineKernel : KernelTraits<KernelId::kExpertCombine, ExpertCombineArgs, 128> {
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
