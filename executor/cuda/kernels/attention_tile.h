#pragma once

// Common parts of the attention kernels: arguments, which keys a query sees, the score of a pair,
// and tiles of queries, keys and values in shared memory.
//
// Shapes: q is (batch, seq_q, heads, head_dim), k is (batch, seq_k, kv_heads, head_dim), and v is
// (batch, seq_k, kv_heads, value_dim). They may be slices of one array: with 8 heads of 64, the
// rows of a fused (q, k, v) are 1,536 wide, and k is HeadArray{qkv, row 1536, first 512, head 64}.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/array.h"
#include "executor/cuda/kernels/block.h"
#include "executor/cuda/kernels/elementwise.h"
#include "executor/cuda/kernels/tile.h"

namespace shardwright::gpu {

// One of q, k, v or their gradients: head h of row r begins at element r * row + first + h * head.
struct HeadArray {
  Array array = {};
  std::int64_t row = 0, first = 0, head = 0;
};

struct AttentionArgs {
  HeadArray q = {}, k = {}, v = {}, dq = {}, dk = {}, dv = {};
  Array y = {}, dy = {};        // (rows, heads, value_dim)
  Array bias = {}, dbias = {};  // (heads, seq_q, seq_k); null: none
  float* log_sums = nullptr;    // (batch, heads, seq_q)
  float* products = nullptr;    // the same: D
  std::int64_t batch = 0, heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  std::int64_t seq_q = 0, seq_k = 0;
  std::int64_t window = 0;
  bool causal = false, drops = false;
  float factor = 1.0F, soft_cap = 0.0F;
  double alibi_max = 0.0;
  DropoutMask mask;
  int tile_q = 64, tile_k = 64;  // powers of two, 16 to 64
  DType multiply_as = DType::kFp32;
};

inline constexpr int kAttentionThreads = 128;

// Keys [begin, end) that a query sees. The last query sees the last key; with fewer keys than
// queries the first sees the first.
//   queries  keys  query  causal  window  sees
//   8        8     5      no      -       [0, 8)
//   8        8     5      yes     -       [0, 6)
//   8        8     5      yes     3       [3, 6)
//   8        8     5      no      3       [3, 8)
//   2        8     0      yes     -       [0, 7)   as when 6 keys come from a cache
//   8        4     2      yes     -       [0, 3)
struct Visible {
  std::int64_t begin, end;
};
SW_DEVICE Visible VisibleKeys(const AttentionArgs& a, std::int64_t query) {
  const std::int64_t own = query + (a.seq_k > a.seq_q ? a.seq_k - a.seq_q : 0);
  Visible range{0, a.seq_k};
  if (a.window > 0) {
    range.begin = own - a.window + 1 > 0 ? own - a.window + 1 : 0;
    range.end = own + a.window < a.seq_k ? own + a.window : a.seq_k;
  }
  if (a.causal) {
    range.end = own + 1 < a.seq_k ? own + 1 : a.seq_k;
  }
  range.begin = range.begin < range.end ? range.begin : range.end;
  return range;
}

// The ALiBi slope of a head. Source: Press et al., arXiv 2108.12409, and MPT's gen_slopes.
// Example with alibi_max = 8: 4 heads get 1/4, 1/16, 1/64 and 1/256. 6 heads take from the slopes
// of 8 heads first every second one, 1/4, 1/16, 1/64, 1/256, and then 1/2 and 1/8.
SW_DEVICE float AlibiSlope(const AttentionArgs& a, std::int64_t head) {
  if (a.alibi_max <= 0.0) {
    return 0.0F;
  }
  std::int64_t slopes = 1;
  while (slopes < a.heads) {
    slopes *= 2;
  }
  std::int64_t index = head;
  if (slopes != a.heads) {
    index = head < slopes / 2 ? 2 * head + 1 : 2 * (head - slopes / 2);
  }
  return static_cast<float>(
      exp2(-static_cast<double>(index + 1) * a.alibi_max / static_cast<double>(slopes)));
}

// A tile of queries by keys of one head.
struct AttentionTile {
  std::int64_t sample, head, kv_head;
  std::int64_t query, key;
  float slope;
};

// The score of a pair: `raw` is q k.
// Example: raw 40, factor 1/8 and soft cap 50 give capped = 50 tanh(5 / 50) = 4.98. A bias of 1 and
// a slope of 1/4 at a distance of 4 keys give value = 4.98 + 1 - 1 = 4.98.
struct Score {
  bool is_visible;
  float value;   // with bias and ALiBi
  float capped;  // before them
};
SW_DEVICE Score ScoreOf(const AttentionArgs& a, const AttentionTile& tile, std::int64_t query,
                        std::int64_t key, float raw) {
  Score score{false, 0.0F, 0.0F};
  if (query >= a.seq_q) {
    return score;
  }
  const Visible range = VisibleKeys(a, query);
  if (key < range.begin || key >= range.end) {
    return score;
  }
  score.is_visible = true;
  score.capped = raw * a.factor;
  if (a.soft_cap > 0.0F) {
    score.capped = a.soft_cap * tanhf(score.capped / a.soft_cap);
  }
  score.value = score.capped;
  if (a.bias.data != nullptr) {
    score.value += Load(a.bias, (tile.head * a.seq_q + query) * a.seq_k + key);
  }
  if (tile.slope != 0.0F) {
    score.value += tile.slope * static_cast<float>(key - query);
  }
  return score;
}

// Dropout of one pair: 0, or 1 / (1 - p). Rows of the mask are padded to a multiple of 4 keys.
// Example: with seq_k = 10, query 2 and key 3 of head 0 use random number 2 x 12 + 3 = 27 of the
// sample. Forward and backward ask for the same number, so no mask is stored.
SW_DEVICE float PairFactor(const AttentionArgs& a, const AttentionTile& tile, std::int64_t query,
                           std::int64_t key) {
  if (!a.drops) {
    return 1.0F;
  }
  const std::int64_t row = tile.head * a.seq_q + query;
  return DropoutFactor(a.mask, tile.sample, row * ((a.seq_k + 3) / 4 * 4) + key);
}

// Panels of a kernel in shared memory; widths are padded to whole tiles, and the padding holds
// zeros.
template <class T>
SW_DEVICE Panel<T> NewPanel(Block& block, std::int64_t rows, std::int64_t columns) {
  const auto stride = static_cast<int>(RoundTile(columns)) + kPadElements;
  return {block.Shared<T>(rows * stride), stride};
}
SW_DEVICE Panel<float> NewSums(Block& block, std::int64_t rows, std::int64_t columns) {
  const auto stride = static_cast<int>(RoundTile(columns)) + kPadSums;
  return {block.Shared<float>(rows * stride), stride};
}
template <class T>
[[nodiscard]] constexpr std::int64_t PanelSize(std::int64_t rows, std::int64_t columns) {
  return SharedSize<T>(rows * (RoundTile(columns) + kPadElements));
}
[[nodiscard]] constexpr std::int64_t SumsSize(std::int64_t rows, std::int64_t columns) {
  return SharedSize<float>(rows * (RoundTile(columns) + kPadSums));
}

// Rows of `features` from element `first` on, `stride` apart, of which there are `count`; of one
// head of one sample.
struct RowsOfHead {
  const Array& array;
  std::int64_t first, stride, count, features;
};
template <class T>
SW_DEVICE void StoreInPanel(const Eight& eight, DType dtype, T* to) {
  float numbers[kVector];
  Unpack(eight, dtype, numbers);
  SW_UNROLL
  for (int k = 0; k < kVector; ++k) {
    FromFloat(numbers[k], to + k);
  }
}
// The first `rows` of them, zeros behind them. Four vectors of a thread are under way at once.
template <class T>
SW_DEVICE void LoadRows(int t, const RowsOfHead& from, int rows, const Panel<T>& to) {
  constexpr int kAtOnce = 4;
  const int across = static_cast<int>(RoundTile(from.features)) / kVector;
  const int all = rows * across;
  for (int begin = t; begin < all; begin += kAtOnce * kAttentionThreads) {
    Eight eights[kAtOnce] = {};
    SW_UNROLL
    for (int n = 0; n < kAtOnce; ++n) {
      const int e = begin + n * kAttentionThreads;
      const int row = e / across;
      const int feature = e % across * kVector;
      if (e < all && row < from.count && feature < from.features) {
        eights[n] = LoadEight(from.array, from.first + row * from.stride + feature,
                              from.features - feature);
      }
    }
    SW_UNROLL
    for (int n = 0; n < kAtOnce; ++n) {
      const int e = begin + n * kAttentionThreads;
      if (e < all) {
        StoreInPanel(eights[n], from.array.dtype, to.At(e / across) + e % across * kVector);
      }
    }
  }
}

SW_DEVICE void ZeroSums(int t, const Panel<float>& sums, int rows) {
  for (int e = t; e < rows * sums.stride; e += kAttentionThreads) {
    sums.data[e] = 0.0F;
  }
}

template <class T>
SW_DEVICE void LoadQueries(int t, const AttentionArgs& a, const AttentionTile& tile,
                           const Panel<T>& to) {
  LoadRows(
      t,
      {a.q.array, (tile.sample * a.seq_q + tile.query) * a.q.row + a.q.first + tile.head * a.q.head,
       a.q.row, a.seq_q - tile.query, a.head_dim},
      a.tile_q, to);
}
template <class T>
SW_DEVICE void LoadKeys(int t, const AttentionArgs& a, const AttentionTile& tile,
                        const Panel<T>& to) {
  LoadRows(t,
           {a.k.array,
            (tile.sample * a.seq_k + tile.key) * a.k.row + a.k.first + tile.kv_head * a.k.head,
            a.k.row, a.seq_k - tile.key, a.head_dim},
           a.tile_k, to);
}
template <class T>
SW_DEVICE void LoadValues(int t, const AttentionArgs& a, const AttentionTile& tile,
                          const Panel<T>& to) {
  LoadRows(t,
           {a.v.array,
            (tile.sample * a.seq_k + tile.key) * a.v.row + a.v.first + tile.kv_head * a.v.head,
            a.v.row, a.seq_k - tile.key, a.value_dim},
           a.tile_k, to);
}
// The output's gradient.
template <class T>
SW_DEVICE void LoadOutputGrads(int t, const AttentionArgs& a, const AttentionTile& tile,
                               const Panel<T>& to) {
  LoadRows(t,
           {a.dy, ((tile.sample * a.seq_q + tile.query) * a.heads + tile.head) * a.value_dim,
            a.heads * a.value_dim, a.seq_q - tile.query, a.value_dim},
           a.tile_q, to);
}

}  // namespace shardwright::gpu
