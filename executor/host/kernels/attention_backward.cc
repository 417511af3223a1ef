// The backward half of attention: scores are computed again tile by tile. With P the softmax, F the
// dropout factors and D = rowsum(dO o O):
//   dV = (P o F)^T dO,  dP = F o (dO V^T),  dS = P o (dP - D),  dQ = factor dS K,  dK = factor dS^T
//   Q.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "executor/host/kernels/attention.h"
#include "executor/host/kernels/clones.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

struct BackwardScratch {
  float* probabilities;
  float* grads;     // of probabilities, then of scores
  float* dropped;   // probabilities after dropout
  float* capped;    // scores after the cap
  float* dq;        // (queries of a tile, head_dim)
  float* dk;        // (seq_k, head_dim)
  float* dv;        // (seq_k, value_dim)
  float* products;  // D of each query of a tile
  float* bias;      // (heads of a group, seq_q, seq_k) or null
  std::span<std::byte> gemm;
  // In a ring, of all heads and kept from step to step: gradients of the queries, and of the keys
  // and then the values that are here.
  float* all_dq = nullptr;
  float* here = nullptr;
};

SHARDWRIGHT_CLONES void ScoreGrad(const float* probabilities, float product, float* grads,
                                  std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    grads[i] = probabilities[i] * (grads[i] - product);
  }
}

// Through score = cap * tanh(s / cap).
SHARDWRIGHT_CLONES void SoftCapGrad(const float* capped, float inverse_cap, float* grads,
                                    std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float t = capped[i] * inverse_cap;
    grads[i] *= 1.0F - t * t;
  }
}

class AttentionGrad {
 public:
  AttentionGrad(const ModelOpCall& call, const BackwardScratch& scratch)
      : call_(call),
        spec_(*call.spec),
        heads_(FindHeads(call)),
        grads_(FindHeadGrads(call)),
        scratch_(scratch),
        drops_(spec_.dropout_p > 0.0 && call.is_training) {}

  // One sample's group of query heads that share a head of keys and values.
  void RunGroup(std::int64_t sample, std::int64_t kv_head) {
    const std::int64_t group = spec_.heads / spec_.kv_heads;
    if (scratch_.here != nullptr) {
      const std::int64_t row = (sample * spec_.kv_heads + kv_head) * spec_.seq_k;
      const std::int64_t rows = call_.batch * spec_.kv_heads * spec_.seq_k;
      scratch_.dk = scratch_.here + row * spec_.head_dim;
      scratch_.dv = scratch_.here + rows * spec_.head_dim + row * spec_.value_dim;
    }
    if (call_.ring.part != RingPart::kFinish) {
      std::fill_n(scratch_.dk, spec_.seq_k * spec_.head_dim, 0.0F);
      std::fill_n(scratch_.dv, spec_.seq_k * spec_.value_dim, 0.0F);
    }
    const std::int64_t step = AttentionTilesOf(spec_).queries;
    AttentionTile tile;
    tile.sample = sample;
    for (std::int64_t g = 0; g < group; ++g) {
      tile.head = kv_head * group + g;
      for (tile.query = 0; tile.query < spec_.seq_q; tile.query += step) {
        tile.queries = std::min(step, spec_.seq_q - tile.query);
        RunQueries(tile, kv_head, g);
      }
    }
    for (std::int64_t key = 0; key < spec_.seq_k && call_.ring.part != RingPart::kAttend; ++key) {
      Store(scratch_.dk + key * spec_.head_dim, spec_.head_dim, grads_.k,
            sample * spec_.seq_k + key, kv_head);
      Store(scratch_.dv + key * spec_.value_dim, spec_.value_dim, grads_.v,
            sample * spec_.seq_k + key, kv_head);
    }
  }

 private:
  static void Store(const float* values, std::int64_t n, const HeadPlace& to, std::int64_t row,
                    std::int64_t head) {
    if (to.data != nullptr) {
      StoreFloats(values, n, {to.data, to.dtype, 0}, to.At(row, head));
    }
  }

  // Element of the output and its gradient at which a query's values begin.
  [[nodiscard]] std::int64_t OutputAt(const AttentionTile& tile, std::int64_t i) const {
    return ((tile.sample * spec_.seq_q + tile.query + i) * spec_.heads + tile.head) *
           spec_.value_dim;
  }

  [[nodiscard]] GemmOperand OutputGrad(const AttentionTile& tile, bool transposed) const {
    const ConstView& dy = call_.output_grads[0];
    const auto* const data = static_cast<const std::byte*>(dy.data);
    const std::int64_t row = spec_.heads * spec_.value_dim;
    return {data + OutputAt(tile, 0) * SizeOf(dy.dtype), dy.dtype, transposed ? 1 : row,
            transposed ? row : 1};
  }

  void RunQueries(AttentionTile tile, std::int64_t kv_head, std::int64_t group_head) {
    if (scratch_.all_dq != nullptr) {
      const std::int64_t row = (tile.sample * spec_.heads + tile.head) * spec_.seq_q + tile.query;
      scratch_.dq = scratch_.all_dq + row * spec_.head_dim;
    }
    if (call_.ring.part != RingPart::kFinish) {
      SumOverKeys(tile, kv_head, group_head);
    }
    for (std::int64_t i = 0; i < tile.queries && call_.ring.part != RingPart::kAttend; ++i) {
      Store(scratch_.dq + i * spec_.head_dim, spec_.head_dim, grads_.q,
            tile.sample * spec_.seq_q + tile.query + i, tile.head);
    }
  }

  void SumOverKeys(AttentionTile tile, std::int64_t kv_head, std::int64_t group_head) {
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      float product = 0.0F;
      ForEachChunk(spec_.value_dim, [&](std::int64_t begin, std::int64_t n) {
        ChunkBuffer o;
        ChunkBuffer g;
        const std::int64_t at = OutputAt(tile, i) + begin;
        product += VectorDot(ReadFloats(AsConst(call_.outputs[0]), at, n, o.values.data()),
                             ReadFloats(call_.output_grads[0], at, n, g.values.data()), n);
      });
      scratch_.products[i] = product;
    }
    if (call_.ring.part == RingPart::kNone || call_.ring.is_first) {
      std::fill_n(scratch_.dq, tile.queries * spec_.head_dim, 0.0F);
    }
    for (tile = NextTile(call_, tile); tile.keys > 0; tile = NextTile(call_, tile)) {
      RunTile(tile, kv_head, group_head);
      tile.key += tile.keys;
    }
  }

  void RunTile(const AttentionTile& tile, std::int64_t kv_head, std::int64_t group_head) {
    const std::int64_t key_row = tile.sample * spec_.seq_k + tile.key;
    const bool caps = spec_.soft_cap > 0.0;
    ComputeScores(call_, heads_, tile, scratch_.probabilities, caps ? scratch_.capped : nullptr,
                  scratch_.gemm);
    HostGemm({tile.queries, tile.keys, spec_.value_dim}, OutputGrad(tile, false),
             ColumnsAt(heads_.v, key_row, kv_head), {scratch_.grads, DType::kFp32, tile.keys},
             nullptr, scratch_.gemm);
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      RunRow(tile, i, group_head);
    }
    const float* const dropped = drops_ ? scratch_.dropped : scratch_.probabilities;
    HostGemm({tile.keys, spec_.value_dim, tile.queries}, {dropped, DType::kFp32, 1, tile.keys},
             OutputGrad(tile, false),
             {scratch_.dv + tile.key * spec_.value_dim, DType::kFp32, spec_.value_dim, true},
             nullptr, scratch_.gemm);
    HostGemm({tile.queries, spec_.head_dim, tile.keys},
             {scratch_.grads, DType::kFp32, tile.keys, 1}, RowsAt(heads_.k, key_row, kv_head),
             {scratch_.dq, DType::kFp32, spec_.head_dim, true}, nullptr, scratch_.gemm);
    HostGemm({tile.keys, spec_.head_dim, tile.queries},
             {scratch_.grads, DType::kFp32, 1, tile.keys},
             RowsAt(heads_.q, tile.sample * spec_.seq_q + tile.query, tile.head),
             {scratch_.dk + tile.key * spec_.head_dim, DType::kFp32, spec_.head_dim, true}, nullptr,
             scratch_.gemm);
  }

  // Probabilities, and gradients of scores, of one query; zeros where it sees nothing.
  void RunRow(const AttentionTile& tile, std::int64_t i, std::int64_t group_head) {
    const KeyRange columns = VisibleColumns(call_, tile, i);
    const std::int64_t n = columns.end - columns.begin;
    const std::int64_t row = i * tile.keys;
    for (float* const values : {scratch_.probabilities, scratch_.grads, scratch_.dropped}) {
      std::fill(values + row, values + row + columns.begin, 0.0F);
      std::fill(values + row + columns.end, values + row + tile.keys, 0.0F);
    }
    const auto* const log_sums = reinterpret_cast<const float*>(call_.saved.data());
    const float log_sum =
        log_sums[(tile.sample * spec_.heads + tile.head) * spec_.seq_q + tile.query + i];
    float* const p = scratch_.probabilities + row + columns.begin;
    float* const g = scratch_.grads + row + columns.begin;
    VectorExp(p, log_sum, p, n);
    if (drops_) {
      ChunkBuffer factors;
      AttentionDropout(call_, tile, i, columns, factors.values.data());
      const float* const f = factors.values.data() + columns.begin;
      VectorProduct(p, f, scratch_.dropped + row + columns.begin, n);
      VectorProduct(g, f, g, n);
    }
    ScoreGrad(p, scratch_.products[i], g, n);
    if (scratch_.bias != nullptr) {
      const std::int64_t at =
          (group_head * spec_.seq_q + tile.query + i) * spec_.seq_k + tile.key + columns.begin;
      VectorAdd(1.0F, g, scratch_.bias + at, n);
    }
    if (spec_.soft_cap > 0.0) {
      SoftCapGrad(scratch_.capped + row + columns.begin, 1.0F / static_cast<float>(spec_.soft_cap),
                  g, n);
    }
    VectorScale(ScoreFactor(spec_), g, g, n);
  }

  const ModelOpCall& call_;
  const OpSpec& spec_;
  HeadPlaces heads_;
  HeadPlaces grads_;
  BackwardScratch scratch_;
  bool drops_;
};

// Gradients of tensors of which attention reads a part only begin as zeros.
void ClearPartialGrads(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  if (Wants(call.input_grads, 2) &&
      call.input_grads[2].elements != call.batch * spec.seq_k * spec.kv_heads * spec.value_dim) {
    ZeroFill(call.input_grads[2]);
  }
}

// What the next rank gets: the gradients of the keys and values that are here, added to those that
// came.
void AddCame(const ModelOpCall& call, std::span<const float> here) {
  auto* const sum = reinterpret_cast<float*>(call.exchange.data());
  std::copy(here.begin(), here.end(), sum);
  if (!call.ring.came.empty()) {
    VectorAdd(1.0F, reinterpret_cast<const float*>(call.ring.came.data()), sum, std::ssize(here));
  }
}

BackwardScratch TakeScratch(const ModelOpCall& call, Scratch& memory) {
  const OpSpec& spec = *call.spec;
  const HostAttentionTiles tiles = AttentionTilesOf(spec);
  const std::int64_t tile = tiles.queries * tiles.keys;
  BackwardScratch scratch{};
  scratch.probabilities = memory.Floats(tile);
  scratch.grads = memory.Floats(tile);
  scratch.dropped = memory.Floats(tile);
  scratch.capped = memory.Floats(tile);
  scratch.dq = memory.Floats(tiles.queries * spec.head_dim);
  scratch.dk = memory.Floats(spec.seq_k * spec.head_dim);
  scratch.dv = memory.Floats(spec.seq_k * spec.value_dim);
  scratch.products = memory.Floats(tiles.queries);
  scratch.gemm = memory.Take(tiles.gemm_bytes);
  return scratch;
}

// The gradient of a position bias is summed over the samples, which is why they are the inner loop,
// and one thread's.
void BackwardWithBias(const ModelOpCall& call) {
  const OpSpec& spec = *call.spec;
  const std::int64_t pairs = spec.heads / spec.kv_heads * spec.seq_q * spec.seq_k;
  Scratch memory(call.workspace);
  BackwardScratch scratch = TakeScratch(call, memory);
  scratch.bias = memory.Floats(pairs);
  AttentionGrad grad(call, scratch);
  for (std::int64_t kv_head = 0; kv_head < spec.kv_heads; ++kv_head) {
    std::fill_n(scratch.bias, pairs, 0.0F);
    for (std::int64_t sample = 0; sample < call.batch; ++sample) {
      grad.RunGroup(sample, kv_head);
    }
    StoreFloats(scratch.bias, pairs, call.input_grads[3], kv_head * pairs);
  }
}

}  // namespace

void AttentionBackward(const ModelOpCall& whole) {
  OpSpec of_step;
  ModelOpCall call = AtRingStep(whole, of_step);
  if (call.ring.part == RingPart::kPack) {
    return;
  }
  ClearPartialGrads(call);
  const OpSpec& spec = *call.spec;
  BackwardScratch ring{};
  if (call.ring.part != RingPart::kNone) {
    const std::int64_t keys =
        call.batch * spec.kv_heads * spec.seq_k * (spec.head_dim + spec.value_dim);
    Scratch kept(call.workspace);  // from step to step
    ring.all_dq = kept.Floats(call.batch * spec.heads * spec.seq_q * spec.head_dim);
    ring.here = kept.Floats(keys);
    call.workspace = kept.Rest();
    if (call.ring.part == RingPart::kAdd) {
      return AddCame(call, {ring.here, static_cast<std::size_t>(keys)});
    }
    if (call.ring.part == RingPart::kFinish) {  // those of this rank have come home
      std::memcpy(ring.here, call.ring.came.data(), call.ring.came.size());
    }
  }
  const bool wants_bias = spec.has_bias && call.input_grads[3].data != nullptr;
  if (wants_bias) {
    BackwardWithBias(call);
    return;
  }
  const std::int64_t group = spec.heads / spec.kv_heads;
  ForEachPart(call.team, call.batch * spec.kv_heads, 1 + LeastHeads(spec) / (2 * group),
              [&](std::int64_t first, std::int64_t last, std::size_t worker) {
                Scratch memory(WorkspaceOf(call, worker));
                BackwardScratch scratch = TakeScratch(call, memory);
                scratch.all_dq = ring.all_dq;
                scratch.here = ring.here;
                AttentionGrad grad(call, scratch);
                for (std::int64_t i = first; i < last; ++i) {
                  grad.RunGroup(i / spec.kv_heads, i % spec.kv_heads);
                }
              });
}

}  // namespace shardwright
