#pragma once

// Flash attention, forward: scores live in shared memory only. The log-sum of each query's scores
// is kept for backward (attention_grad.h). 16-bit operands are multiplied as such: P is rounded to
// them, as every flash kernel does.
//
// The softmax of a row is made tile by tile. Example: one query, scores 1 and 3 with values 10 and
// 20 in the first tile, score 5 with value 40 in the second.
//
//   tile 1   maximum 3, sum = e^-2 + 1 = 1.135, o = 10 e^-2 + 20 = 21.35
//   tile 2   maximum 5, so both are multiplied with e^(3 - 5) = 0.135:
//            sum = 0.154 + 1 = 1.154, o = 2.89 + 40 = 42.89
//   end      y = 42.89 / 1.154 = 37.2; log-sum = 5 + ln 1.154 = 5.14
//
// Memory is O(tile) per block and the log-sums O(seq_q), where the scores would be O(seq_q seq_k):
// with 32 heads and 8,192 tokens 1 MiB of log-sums instead of 4 GiB of bf16 scores.

#include <cmath>
#include <cstdint>

#include "executor/cuda/kernels/attention_tile.h"
#include "executor/cuda/kernels/kernel_id.h"

namespace shardwright::gpu {

// A block per (sample, head, tile of queries).
// Example: 2 samples, 8 heads and 200 queries in tiles of 64 are 2 x 8 x 4 = 64 blocks. The last
// tile of a head has 8 queries; its other rows are zeros and are not stored.
//
// Tiles of keys that no query of the block sees are skipped: causal, queries 64 to 127 visit keys 0
// to 127 only.
struct AttentionForwardKernel
    : KernelTraits<KernelId::kAttentionForward, AttentionArgs, kAttentionThreads> {
  template <class T>
  [[nodiscard]] static constexpr std::int64_t Shared(const Args& a) {
    return PanelSize<T>(a.tile_q, a.head_dim) + PanelSize<T>(a.tile_k, a.head_dim) +
           PanelSize<T>(a.tile_k, a.value_dim) + PanelSize<T>(a.tile_q, a.tile_k) +
           SumsSize(a.tile_q, a.tile_k) + SumsSize(a.tile_q, a.value_dim) +
           2 * SharedSize<float>(a.tile_q) + 2 * SharedSize<float>(kThreads);
  }

  static SW_DEVICE void Run(Block& block, const Args& args) {
    WithElement(args.multiply_as, [&](auto element) { RunAs<decltype(element)>(block, args); });
  }

 private:
  template <class T>
  struct Memory {
    Panel<T> q, k, v, p;
    Panel<float> s, o;
    float *largest, *sums;       // by query
    float *part_max, *part_sum;  // by thread
  };

  template <class T>
  static SW_DEVICE void RunAs(Block& block, const Args& a) {
    const std::int64_t tiles = (a.seq_q + a.tile_q - 1) / a.tile_q;
    AttentionTile tile{};
    tile.query = block.index() % tiles * a.tile_q;
    tile.head = block.index() / tiles % a.heads;
    tile.sample = block.index() / tiles / a.heads;
    tile.kv_head = tile.head / (a.heads / a.kv_heads);
    tile.slope = AlibiSlope(a, tile.head);
    Memory<T> m{NewPanel<T>(block, a.tile_q, a.head_dim),
                NewPanel<T>(block, a.tile_k, a.head_dim),
                NewPanel<T>(block, a.tile_k, a.value_dim),
                NewPanel<T>(block, a.tile_q, a.tile_k),
                NewSums(block, a.tile_q, a.tile_k),
                NewSums(block, a.tile_q, a.value_dim),
                block.Shared<float>(a.tile_q),
                block.Shared<float>(a.tile_q),
                block.Shared<float>(kThreads),
                block.Shared<float>(kThreads)};
    block.Each([&](int t) {
      LoadQueries(t, a, tile, m.q);
      ZeroSums(t, m.o, a.tile_q);
      if (t < a.tile_q) {
        m.largest[t] = -INFINITY;
        m.sums[t] = 0.0F;
      }
    });
    const std::int64_t last =
        (tile.query + a.tile_q < a.seq_q ? tile.query + a.tile_q : a.seq_q) - 1;
    const std::int64_t end = VisibleKeys(a, last).end;
    tile.key = VisibleKeys(a, tile.query).begin / kTile * kTile;
    for (; tile.key < end; tile.key += a.tile_k) {
      block.Each([&](int t) {
        LoadKeys(t, a, tile, m.k);
        LoadValues(t, a, tile, m.v);
      });
      MultiplyPanels<false, true>(block,
                                  {a.tile_q, a.tile_k, static_cast<int>(RoundTile(a.head_dim))},
                                  m.q, m.k, m.s, false);
      Softmax(block, a, tile, m);
      MultiplyPanels<false, false>(block,
                                   {a.tile_q, static_cast<int>(RoundTile(a.value_dim)), a.tile_k},
                                   m.p, m.v, m.o, true);
    }
    Finish(block, a, tile, m);
  }

  // Scores become exp(score - maximum so far); what was summed with an older maximum is rescaled.
  // `lanes` threads share a row: with 64 queries and 128 threads two, which take every second key.
  // The first phase finds each lane's maximum, the second makes the exponentials and rescales the
  // output, the third joins the sums of the lanes. The sum counts every key, dropped or not, as
  // PyTorch drops behind the softmax.
  template <class T>
  static SW_DEVICE void Softmax(Block& block, const Args& a, const AttentionTile& tile,
                                const Memory<T>& m) {
    const int lanes = kThreads / a.tile_q;  // threads of a query
    block.Each([&](int t) {
      const int row = t / lanes;
      float largest = -INFINITY;
      for (int c = t % lanes; c < a.tile_k; c += lanes) {
        float& s = m.s.data[row * m.s.stride + c];
        const Score score = ScoreOf(a, tile, tile.query + row, tile.key + c, s);
        s = score.is_visible ? score.value : -INFINITY;
        largest = fmaxf(largest, s);
      }
      m.part_max[t] = largest;
    });
    block.Each([&](int t) {
      const int row = t / lanes;
      const float largest = RowMax(m, row, lanes);
      const float rescale = m.largest[row] == largest ? 1.0F : expf(m.largest[row] - largest);
      float sum = 0.0F;
      for (int c = t % lanes; c < a.tile_k; c += lanes) {
        const float s = m.s.data[row * m.s.stride + c];
        const float p = s == -INFINITY ? 0.0F : expf(s - largest);
        sum += p;
        const float kept =
            p > 0.0F ? p * PairFactor(a, tile, tile.query + row, tile.key + c) : 0.0F;
        FromFloat(kept, m.p.data + row * m.p.stride + c);
      }
      m.part_sum[t] = sum;
      for (int f = t % lanes; f < m.o.stride; f += lanes) {
        m.o.data[row * m.o.stride + f] *= rescale;
      }
    });
    block.Each([&](int t) {
      const int row = t / lanes;
      if (t % lanes != 0) {
        return;
      }
      const float largest = RowMax(m, row, lanes);
      const float rescale = m.largest[row] == largest ? 1.0F : expf(m.largest[row] - largest);
      float sum = m.sums[row] * rescale;
      for (int l = 0; l < lanes; ++l) {
        sum += m.part_sum[t + l];
      }
      m.sums[row] = sum;
      m.largest[row] = largest;
    });
  }

  template <class T>
  static SW_DEVICE float RowMax(const Memory<T>& m, int row, int lanes) {
    float largest = m.largest[row];
    for (int l = 0; l < lanes; ++l) {
      largest = fmaxf(largest, m.part_max[row * lanes + l]);
    }
    return largest;
  }

  template <class T>
  static SW_DEVICE void Finish(Block& block, const Args& a, const AttentionTile& tile,
                               const Memory<T>& m) {
    block.Each([&](int t) {
      for (std::int64_t e = t; e < a.tile_q * a.value_dim; e += kThreads) {
        const std::int64_t row = e / a.value_dim;
        const std::int64_t feature = e % a.value_dim;
        if (tile.query + row < a.seq_q) {
          const float sum = m.sums[row];  // a query that sees no key gets zeros
          const std::int64_t at =
              ((tile.sample * a.seq_q + tile.query + row) * a.heads + tile.head) * a.value_dim;
          Store(a.y, at + feature, sum > 0.0F ? m.o.data[row * m.o.stride + feature] / sum : 0.0F);
        }
      }
      if (t < a.tile_q && tile.query + t < a.seq_q) {
        const std::int64_t at = (tile.sample * a.heads + tile.head) * a.seq_q + tile.query + t;
        a.log_sums[at] = m.sums[t] > 0.0F ? m.largest[t] + logf(m.sums[t]) : 0.0F;
      }
    });
  }
};

}  // namespace shardwright::gpu
