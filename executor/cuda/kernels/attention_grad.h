#pragma once

// Flash attention, backward: the scores are computed again, once for the keys' gradients and once
// for the queries', so that no sum needs atomics. With P the softmax, F the dropout factors and D =
// rowsum(dO o O):
//   dV = (P o F)^T dO,  dS = P o (F o (dO V^T) - D),  dQ = factor dS K,  dK = factor dS^T Q.
// 16-bit operands are multiplied as such: P and dS are rounded to them, as every flash kernel does.
//
// Example: one query, two keys with P = (0.25, 0.75), values 10 and 20, so O = 17.5. With dO = 2: D
// = 35, dO V^T = (20, 40), dS = (0.25 (20 - 35), 0.75 (40 - 35)) = (-3.75, 3.75). A row of dS sums
// to 0, as a constant added to all scores changes nothing.
//
// Cost: seven products of a tile instead of the five of FlashAttention 2, which adds dQ with
// atomics. S and dO V^T are made twice; in exchange each gradient has one writer and one order of
// sums.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/attention_tile.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// D of every query; a thread each.
struct AttentionProductsKernel : KernelTraits<KernelId::kAttentionProducts, AttentionArgs, 128> {
  static SW_DEVICE void Run(Block& block, const Args& a) {
    block.Each([&](int t) {
      const std::int64_t i = block.index() * kThreads + t;
      if (i >= a.batch * a.heads * a.seq_q) {
        return;
      }
      const std::int64_t query = i % a.seq_q;
      const std::int64_t head = i / a.seq_q % a.heads;
      const std::int64_t sample = i / a.seq_q / a.heads;
      const std::int64_t at = ((sample * a.seq_q + query) * a.heads + head) * a.value_dim;
      float sum = 0.0F;
      for (std::int64_t f = 0; f < a.value_dim; ++f) {
        sum += Load(a.y, at + f) * Load(a.dy, at + f);
      }
      a.products[i] = sum;
    });
  }
};

// Shared memory of the three gradient kernels: a tile of probabilities and one of score gradients.
template <class T>
struct GradMemory {
  Panel<T> q, k, v, dy;
  Panel<T> p, ds;      // after dropout; with the factor and the cap's slope
  Panel<float> s, dp;  // raw scores; gradients of probabilities, then of scores
};

template <class T>
[[nodiscard]] constexpr std::int64_t GradShared(const AttentionArgs& a) {
  return PanelSize<T>(a.tile_q, a.head_dim) + PanelSize<T>(a.tile_k, a.head_dim) +
         PanelSize<T>(a.tile_k, a.value_dim) + PanelSize<T>(a.tile_q, a.value_dim) +
         2 * PanelSize<T>(a.tile_q, a.tile_k) + 2 * SumsSize(a.tile_q, a.tile_k);
}

template <class T>
SW_DEVICE GradMemory<T> NewGradMemory(Block& block, const AttentionArgs& a) {
  return {NewPanel<T>(block, a.tile_q, a.head_dim),  NewPanel<T>(block, a.tile_k, a.head_dim),
          NewPanel<T>(block, a.tile_k, a.value_dim), NewPanel<T>(block, a.tile_q, a.value_dim),
          NewPanel<T>(block, a.tile_q, a.tile_k),    NewPanel<T>(block, a.tile_q, a.tile_k),
          NewSums(block, a.tile_q, a.tile_k),        NewSums(block, a.tile_q, a.tile_k)};
}

// From q, k, v and dy in shared memory to p and ds.
// P comes from the log-sum of forward: p = exp(score - log-sum), with no second pass for a maximum.
// A soft cap c multiplies dS with 1 - (capped / c)^2, the slope of its tanh.
template <class T>
SW_DEVICE void ScoreGrads(Block& block, const AttentionArgs& a, const AttentionTile& tile,
                          const GradMemory<T>& m) {
  MultiplyPanels<false, true>(block, {a.tile_q, a.tile_k, static_cast<int>(RoundTile(a.head_dim))},
                              m.q, m.k, m.s, false);
  MultiplyPanels<false, true>(block, {a.tile_q, a.tile_k, static_cast<int>(RoundTile(a.value_dim))},
                              m.dy, m.v, m.dp, false);
  block.Each([&](int t) {
    for (int e = t; e < a.tile_q * a.tile_k; e += kAttentionThreads) {
      const int row = e / a.tile_k;
      const int column = e % a.tile_k;
      const std::int64_t query = tile.query + row;
      const std::int64_t key = tile.key + column;
      const Score score = ScoreOf(a, tile, query, key, m.s.data[row * m.s.stride + column]);
      float p = 0.0F;
      float kept = 0.0F;
      float ds = 0.0F;
      float slope = 0.0F;
      if (score.is_visible) {
        const std::int64_t at = (tile.sample * a.heads + tile.head) * a.seq_q + query;
        const float factor = PairFactor(a, tile, query, key);
        p = expf(score.value - a.log_sums[at]);
        kept = p * factor;
        ds = p * (m.dp.data[row * m.dp.stride + column] * factor - a.products[at]);
        const float tangent = a.soft_cap > 0.0F ? score.capped / a.soft_cap : 0.0F;
        slope = a.factor * (1.0F - tangent * tangent);
      }
      m.dp.data[row * m.dp.stride + column] = ds;
      FromFloat(kept, m.p.data + row * m.p.stride + column);
      FromFloat(ds * slope, m.ds.data + row * m.ds.stride + column);
    }
  });
}

// Does any query of the tile see any key of it?
// Example: causal with tiles of 64; queries 0 to 63 end at key 64, so they do not meet keys 64 to
// 127. About half of all tiles are skipped.
SW_DEVICE bool Meets(const AttentionArgs& a, const AttentionTile& tile) {
  const std::int64_t last = (tile.query + a.tile_q < a.seq_q ? tile.query + a.tile_q : a.seq_q) - 1;
  return VisibleKeys(a, tile.query).begin < tile.key + a.tile_k &&
         VisibleKeys(a, last).end > tile.key;
}

// Rows [first, first + count) of one head.
struct HeadRows {
  std::int64_t first, count, head;
};
SW_DEVICE void StoreRows(int t, const Panel<float>& from, const HeadArray& to, const HeadRows& rows,
                         std::int64_t features) {
  if (to.array.data == nullptr) {
    return;
  }
  for (std::int64_t e = t; e < rows.count * features; e += kAttentionThreads) {
    const std::int64_t r = e / features;
    const std::int64_t f = e % features;
    Store(to.array, (rows.first + r) * to.row + to.first + rows.head * to.head + f,
          from.data[r * from.stride + f]);
  }
}

// A block per (sample, head of keys, tile of keys). With 8 heads of queries and 2 of keys, the
// block of key head 0 goes through query heads 0 to 3. Their gradients are summed in the block, so
// grouped-query attention needs no repeated k and v.
struct AttentionKeyGradKernel
    : KernelTraits<KernelId::kAttentionKeyGrad, AttentionArgs, kAttentionThreads> {
  template <class T>
  [[nodiscard]] static constexpr std::int64_t Shared(const Args& a) {
    return GradShared<T>(a) + SumsSize(a.tile_k, a.head_dim) + SumsSize(a.tile_k, a.value_dim);
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& a) {
    const std::int64_t tiles = (a.seq_k + a.tile_k - 1) / a.tile_k;
    const std::int64_t group = a.heads / a.kv_heads;
    AttentionTile tile{};
    tile.key = block.index() % tiles * a.tile_k;
    tile.kv_head = block.index() / tiles % a.kv_heads;
    tile.sample = block.index() / tiles / a.kv_heads;
    const GradMemory<T> m = NewGradMemory<T>(block, a);
    const Panel<float> dk = NewSums(block, a.tile_k, a.head_dim);
    const Panel<float> dv = NewSums(block, a.tile_k, a.value_dim);
    block.Each([&](int t) {
      LoadKeys(t, a, tile, m.k);
      LoadValues(t, a, tile, m.v);
      ZeroSums(t, dk, a.tile_k);
      ZeroSums(t, dv, a.tile_k);
    });
    for (std::int64_t g = 0; g < group; ++g) {
      tile.head = tile.kv_head * group + g;
      tile.slope = AlibiSlope(a, tile.head);
      for (tile.query = 0; tile.query < a.seq_q; tile.query += a.tile_q) {
        if (!Meets(a, tile)) {
          continue;
        }
        block.Each([&](int t) {
          LoadQueries(t, a, tile, m.q);
          LoadOutputGrads(t, a, tile, m.dy);
        });
        ScoreGrads(block, a, tile, m);
        MultiplyPanels<true, false>(block,
                                    {a.tile_k, static_cast<int>(RoundTile(a.value_dim)), a.tile_q},
                                    m.p, m.dy, dv, true);
        MultiplyPanels<true, false>(block,
                                    {a.tile_k, static_cast<int>(RoundTile(a.head_dim)), a.tile_q},
                                    m.ds, m.q, dk, true);
      }
    }
    block.Each([&](int t) {
      const std::int64_t left = a.seq_k - tile.key;
      const HeadRows rows{tile.sample * a.seq_k + tile.key, left < a.tile_k ? left : a.tile_k,
                          tile.kv_head};
      StoreRows(t, dk, a.dk, rows, a.head_dim);
      StoreRows(t, dv, a.dv, rows, a.value_dim);
    });
  }
};

// A block per (sample, head, tile of queries).
// It stores rows of dq for its own queries only, so no other block writes them.
struct AttentionQueryGradKernel
    : KernelTraits<KernelId::kAttentionQueryGrad, AttentionArgs, kAttentionThreads> {
  template <class T>
  [[nodiscard]] static constexpr std::int64_t Shared(const Args& a) {
    return GradShared<T>(a) + SumsSize(a.tile_q, a.head_dim);
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& a) {
    const std::int64_t tiles = (a.seq_q + a.tile_q - 1) / a.tile_q;
    AttentionTile tile{};
    tile.query = block.index() % tiles * a.tile_q;
    tile.head = block.index() / tiles % a.heads;
    tile.sample = block.index() / tiles / a.heads;
    tile.kv_head = tile.head / (a.heads / a.kv_heads);
    tile.slope = AlibiSlope(a, tile.head);
    const GradMemory<T> m = NewGradMemory<T>(block, a);
    const Panel<float> dq = NewSums(block, a.tile_q, a.head_dim);
    block.Each([&](int t) {
      LoadQueries(t, a, tile, m.q);
      LoadOutputGrads(t, a, tile, m.dy);
      ZeroSums(t, dq, a.tile_q);
    });
    for (tile.key = 0; tile.key < a.seq_k; tile.key += a.tile_k) {
      if (!Meets(a, tile)) {
        continue;
      }
      block.Each([&](int t) {
        LoadKeys(t, a, tile, m.k);
        LoadValues(t, a, tile, m.v);
      });
      ScoreGrads(block, a, tile, m);
      MultiplyPanels<false, false>(block,
                                   {a.tile_q, static_cast<int>(RoundTile(a.head_dim)), a.tile_k},
                                   m.ds, m.k, dq, true);
    }
    block.Each([&](int t) {
      const std::int64_t left = a.seq_q - tile.query;
      const HeadRows rows{tile.sample * a.seq_q + tile.query, left < a.tile_q ? left : a.tile_q,
                          tile.head};
      StoreRows(t, dq, a.dq, rows, a.head_dim);
    });
  }
};

// The gradient of the position bias, summed over the samples: a block per (head, tile of queries,
// tile of keys).
// The bias is one for the batch, so a block goes through all samples in order.
struct AttentionBiasGradKernel
    : KernelTraits<KernelId::kAttentionBiasGrad, AttentionArgs, kAttentionThreads> {
  template <class T>
  [[nodiscard]] static constexpr std::int64_t Shared(const Args& a) {
    return GradShared<T>(a) + SumsSize(a.tile_q, a.tile_k);
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& a) {
    const std::int64_t tiles_q = (a.seq_q + a.tile_q - 1) / a.tile_q;
    const std::int64_t tiles_k = (a.seq_k + a.tile_k - 1) / a.tile_k;
    AttentionTile tile{};
    tile.key = block.index() % tiles_k * a.tile_k;
    tile.query = block.index() / tiles_k % tiles_q * a.tile_q;
    tile.head = block.index() / tiles_k / tiles_q;
    tile.kv_head = tile.head / (a.heads / a.kv_heads);
    tile.slope = AlibiSlope(a, tile.head);
    const GradMemory<T> m = NewGradMemory<T>(block, a);
    const Panel<float> sums = NewSums(block, a.tile_q, a.tile_k);
    block.Each([&](int t) { ZeroSums(t, sums, a.tile_q); });
    for (tile.sample = 0; tile.sample < a.batch && Meets(a, tile); ++tile.sample) {
      block.Each([&](int t) {
        LoadQueries(t, a, tile, m.q);
        LoadOutputGrads(t, a, tile, m.dy);
        LoadKeys(t, a, tile, m.k);
        LoadValues(t, a, tile, m.v);
      });
      ScoreGrads(block, a, tile, m);
      block.Each([&](int t) {
        for (int e = t; e < a.tile_q * a.tile_k; e += kThreads) {
          const int row = e / a.tile_k;
          const int column = e % a.tile_k;
          sums.data[row * sums.stride + column] += m.dp.data[row * m.dp.stride + column];
        }
      });
    }
    block.Each([&](int t) {
      for (int e = t; e < a.tile_q * a.tile_k; e += kThreads) {
        const int row = e / a.tile_k;
        const int column = e % a.tile_k;
        if (tile.query + row < a.seq_q && tile.key + column < a.seq_k) {
          Store(a.dbias, (tile.head * a.seq_q + tile.query + row) * a.seq_k + tile.key + column,
                sums.data[row * sums.stride + column]);
        }
      }
    });
  }
};

}  // namespace shardwright::gpu
