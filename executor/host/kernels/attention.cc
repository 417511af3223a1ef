#include "executor/host/kernels/attention.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "core/error.h"
#include "executor/host/kernels/dropout.h"
#include "executor/host/kernels/kernels.h"
#include "executor/host/kernels/rows.h"
#include "executor/host/kernels/vector.h"
#include "models/kernels/host.h"

namespace shardwright {
namespace {

GemmOperand OperandAt(const HeadPlace& place, std::int64_t element, std::int64_t row_stride,
                      std::int64_t column_stride) {
  const auto* const data = static_cast<const std::byte*>(place.data);
  return {data + element * SizeOf(place.dtype), place.dtype, row_stride, column_stride};
}

// Running maximum and sum of the softmax of each query of a tile.
struct Softmax {
  float* largest;
  float* sums;
};

// Turns scores of row i into exp(score - maximum), rescales what was summed with an older maximum.
void UpdateRow(const ModelOpCall& call, const AttentionTile& tile, std::int64_t i,
               const Softmax& softmax, float* scores, float* output) {
  const OpSpec& spec = *call.spec;
  const KeyRange columns = VisibleColumns(call, tile, i);
  float* const row = scores + i * tile.keys;
  std::fill(row, row + columns.begin, 0.0F);
  std::fill(row + columns.end, row + tile.keys, 0.0F);
  const std::int64_t n = columns.end - columns.begin;
  if (n == 0) {
    return;
  }
  float* const visible = row + columns.begin;
  const float largest = std::fmax(softmax.largest[i], VectorMax(visible, n));
  const float sum = VectorExp(visible, largest, visible, n);
  if (largest > softmax.largest[i]) {
    const float rescale = std::exp(softmax.largest[i] - largest);  // 0 the first time
    softmax.sums[i] *= rescale;
    VectorScale(rescale, output + i * spec.value_dim, output + i * spec.value_dim, spec.value_dim);
    softmax.largest[i] = largest;
  }
  softmax.sums[i] += sum;
  if (spec.dropout_p > 0.0 && call.is_training) {
    // One row's factors at a time; keys of a tile fit a chunk.
    ChunkBuffer factors;
    AttentionDropout(call, tile, i, columns, factors.values.data());
    VectorProduct(visible, factors.values.data() + columns.begin, visible, n);
  }
}

struct ForwardScratch {
  float* scores;
  float* output;
  Softmax softmax;
  std::span<std::byte> gemm;
};

// All keys of the queries of `tile`; writes the output rows and their log-sums.
void AttendQueries(const ModelOpCall& call, const HeadPlaces& heads, AttentionTile tile,
                   const ForwardScratch& scratch, float* log_sums) {
  const OpSpec& spec = *call.spec;
  const RingPart part = call.ring.part;
  if (part == RingPart::kNone || call.ring.is_first) {
    std::fill_n(scratch.output, tile.queries * spec.value_dim, 0.0F);
    std::fill_n(scratch.softmax.largest, tile.queries, -INFINITY);
    std::fill_n(scratch.softmax.sums, tile.queries, 0.0F);
  }
  const std::int64_t kv_head = tile.head / (spec.heads / spec.kv_heads);
  const auto next = [&] {
    tile = NextTile(call, tile);
    return part != RingPart::kFinish && tile.keys > 0;
  };
  while (next()) {
    ComputeScores(call, heads, tile, scratch.scores, nullptr, scratch.gemm);
    for (std::int64_t i = 0; i < tile.queries; ++i) {
      UpdateRow(call, tile, i, scratch.softmax, scratch.scores, scratch.output);
    }
    HostGemm({tile.queries, spec.value_dim, tile.keys},
             {scratch.scores, DType::kFp32, tile.keys, 1},
             RowsAt(heads.v, tile.sample * spec.seq_k + tile.key, kv_head),
             {scratch.output, DType::kFp32, spec.value_dim, true}, nullptr, scratch.gemm);
    tile.key += tile.keys;
  }
  for (std::int64_t i = 0; i < tile.queries && part != RingPart::kAttend; ++i) {
    float* const row = scratch.output + i * spec.value_dim;
    const float sum = scratch.softmax.sums[i];
    // A query that sees no key gets zeros.
    VectorScale(sum > 0.0F ? 1.0F / sum : 0.0F, row, row, spec.value_dim);
    log_sums[i] = sum > 0.0F ? scratch.softmax.largest[i] + std::log(sum) : 0.0F;
    const std::int64_t at =
        ((tile.sample * spec.seq_q + tile.query + i) * spec.heads + tile.head) * spec.value_dim;
    StoreFloats(row, spec.value_dim, call.outputs[0], at);
  }
}

}  // namespace

GemmOperand RowsAt(const HeadPlace& place, std::int64_t r, std::int64_t h) {
  return OperandAt(place, place.At(r, h), place.row, 1);
}

GemmOperand ColumnsAt(const HeadPlace& place, std::int64_t r, std::int64_t h) {
  return OperandAt(place, place.At(r, h), 1, place.row);
}

ModelOpCall AtRingStep(const ModelOpCall& call, OpSpec& spec) {
  ModelOpCall here = call;
  if (call.ring.part == RingPart::kNone) {
    return here;
  }
  spec = *call.spec;
  spec.seq_k = spec.seq_q;
  here.spec = &spec;
  const std::int64_t rows = call.batch * spec.seq_k * spec.kv_heads;
  if (!call.ring.came.empty() && call.ring.part < RingPart::kAdd) {
    const std::int64_t keys = rows * spec.head_dim;
    here.inputs[1] = {call.ring.came.data(), call.compute, keys};
    here.inputs[2] = {call.ring.came.data() + keys * SizeOf(call.compute), call.compute,
                      rows * spec.value_dim};
  }
  if (call.ring.part == RingPart::kPack) {
    std::byte* to = call.exchange.data();
    SW_CHECK(here.inputs[1].elements + here.inputs[2].elements ==
                 rows * (spec.head_dim + spec.value_dim),
             "keys and values of a ring are apart");
    for (const ConstView& view : {here.inputs[1], here.inputs[2]}) {
      const std::int64_t bytes = view.elements * SizeOf(view.dtype);
      std::memcpy(to, view.data, static_cast<std::size_t>(bytes));
      to += bytes;
    }
  }
  return here;
}

KeyRange VisibleKeys(const ModelOpCall& call, std::int64_t query) {
  const OpSpec& spec = *call.spec;
  if (call.ring.part != RingPart::kNone) {  // of both pieces that the rank has
    const std::int64_t own = call.cut.PositionHere(query, spec.seq_q), piece = spec.seq_q / 2;
    std::int64_t end = 0;
    for (const std::int64_t token : {std::int64_t{0}, piece}) {
      const std::int64_t first = call.cut.PositionOf(call.ring.source, token, spec.seq_q);
      end += std::clamp<std::int64_t>(own - first + 1, 0, piece);
    }
    return {0, end};
  }
  // The last query sees the last key; with fewer keys than queries the first sees the first.
  const std::int64_t own = spec.context_ranks > 0
                               ? call.cut.PositionHere(query, spec.seq_q)
                               : query + std::max<std::int64_t>(0, spec.seq_k - spec.seq_q);
  KeyRange range{0, spec.seq_k};
  if (spec.window > 0) {
    range.begin = std::max<std::int64_t>(0, own - spec.window + 1);
    range.end = std::min(spec.seq_k, own + spec.window);
  }
  if (spec.causal) {
    range.end = std::min(spec.seq_k, own + 1);
  }
  range.begin = std::min(range.begin, range.end);
  return range;
}

KeyRange VisibleColumns(const ModelOpCall& call, const AttentionTile& tile, std::int64_t i) {
  const KeyRange keys = VisibleKeys(call, tile.query + i);
  KeyRange columns{std::clamp<std::int64_t>(keys.begin - tile.key, 0, tile.keys),
                   std::clamp<std::int64_t>(keys.end - tile.key, 0, tile.keys)};
  columns.begin = std::min(columns.begin, columns.end);
  return columns;
}

AttentionTile NextTile(const ModelOpCall& call, AttentionTile tile) {
  // Both ends of the visible range grow with the query. Dropout wants keys in fours.
  const std::int64_t begin = VisibleKeys(call, tile.query).begin / 4 * 4;
  const std::int64_t end = VisibleKeys(call, tile.query + tile.queries - 1).end;
  tile.key = std::max(tile.key, begin);
  tile.keys = std::clamp<std::int64_t>(end - tile.key, 0, kAttentionKeys);
  return tile;
}

float ScoreFactor(const OpSpec& spec) {
  return static_cast<float>(
      spec.factor > 0.0 ? spec.factor : 1.0 / std::sqrt(static_cast<double>(spec.head_dim)));
}

float AlibiSlope(const OpSpec& spec, std::int64_t head) {
  if (spec.alibi_max <= 0.0) {
    return 0.0F;
  }
  const auto heads = static_cast<std::uint64_t>(spec.heads);
  const auto slopes = static_cast<std::int64_t>(std::bit_ceil(heads));
  std::int64_t index = head;  // of `slopes` slopes
  if (slopes != spec.heads) {
    // Every second slope from the second on, then every second from the first on.
    index = head < slopes / 2 ? 2 * head + 1 : 2 * (head - slopes / 2);
  }
  const double exponent =
      static_cast<double>(index + 1) * spec.alibi_max / static_cast<double>(slopes);
  return static_cast<float>(std::exp2(-exponent));
}

std::int64_t LeastHeads(const OpSpec& spec) {
  constexpr std::int64_t kLeastProducts = std::int64_t{1} << 20;
  return 1 + kLeastProducts / (spec.seq_q * spec.seq_k * spec.head_dim);
}

void ComputeScores(const ModelOpCall& call, const HeadPlaces& heads, const AttentionTile& tile,
                   float* scores, float* capped, std::span<std::byte> workspace) {
  const OpSpec& spec = *call.spec;
  const std::int64_t kv_head = tile.head / (spec.heads / spec.kv_heads);
  HostGemm({tile.queries, tile.keys, spec.head_dim},
           RowsAt(heads.q, tile.sample * spec.seq_q + tile.query, tile.head),
           ColumnsAt(heads.k, tile.sample * spec.seq_k + tile.key, kv_head),
           {scores, DType::kFp32, tile.keys}, nullptr, workspace);
  VectorScale(ScoreFactor(spec), scores, scores, tile.queries * tile.keys);
  if (spec.soft_cap > 0.0) {
    VectorSoftCap(static_cast<float>(spec.soft_cap), scores, tile.queries * tile.keys);
  }
  if (capped != nullptr) {
    std::copy_n(scores, tile.queries * tile.keys, capped);
  }
  const float slope = AlibiSlope(spec, tile.head);
  for (std::int64_t i = 0; i < tile.queries && (spec.has_bias || slope != 0.0F); ++i) {
    float* const row = scores + i * tile.keys;
    if (spec.has_bias) {
      ChunkBuffer bias;
      const std::int64_t at = (tile.head * spec.seq_q + tile.query + i) * spec.seq_k + tile.key;
      VectorAdd(1.0F, ReadFloats(call.inputs[3], at, tile.keys, bias.values.data()), row,
                tile.keys);
    }
    for (std::int64_t j = 0; j < tile.keys && slope != 0.0F; ++j) {
      row[j] += slope * static_cast<float>(tile.key + j - (tile.query + i));
    }
  }
}

void AttentionDropout(const ModelOpCall& call, const AttentionTile& tile, std::int64_t i,
                      KeyRange columns, float* factors) {
  const OpSpec& spec = *call.spec;
  const std::int64_t begin = columns.begin / 4 * 4;
  const std::int64_t row = tile.head * spec.seq_q + tile.query + i;
  const std::int64_t first = row * RoundUp(spec.seq_k, 4) + tile.key + begin;
  DropoutFactors(call.dropout, {tile.sample, first, columns.end - begin}, spec.dropout_p,
                 factors + begin);
}

void AttentionForward(const ModelOpCall& whole) {
  OpSpec of_step;
  ModelOpCall call = AtRingStep(whole, of_step);
  if (call.ring.part == RingPart::kPack) {
    return;
  }
  const OpSpec& spec = *call.spec;
  const bool in_ring = call.ring.part != RingPart::kNone;
  const std::int64_t queries = in_ring ? call.batch * spec.heads * spec.seq_q : 0;
  Scratch kept(call.workspace);  // from step to step
  float* const outputs = kept.Floats(queries * spec.value_dim);
  const Softmax softmax = {kept.Floats(queries), kept.Floats(queries)};
  call.workspace = kept.Rest();
  const HostAttentionTiles tiles = AttentionTilesOf(spec);
  const HeadPlaces heads = FindHeads(call);
  auto* const log_sums = reinterpret_cast<float*>(call.saved.data());
  const auto attend = [&](std::int64_t first, std::int64_t last, std::size_t worker) {
    Scratch memory(WorkspaceOf(call, worker));
    ForwardScratch scratch{memory.Floats(tiles.queries * tiles.keys),
                           memory.Floats(tiles.queries * spec.value_dim),
                           {memory.Floats(tiles.queries), memory.Floats(tiles.queries)},
                           memory.Take(tiles.gemm_bytes)};
    for (std::int64_t i = first; i < last; ++i) {
      AttentionTile tile;
      tile.sample = i / spec.heads;
      tile.head = i % spec.heads;
      for (tile.query = 0; tile.query < spec.seq_q; tile.query += tiles.queries) {
        tile.queries = std::min(tiles.queries, spec.seq_q - tile.query);
        if (in_ring) {
          const std::int64_t row = i * spec.seq_q + tile.query;
          scratch.output = outputs + row * spec.value_dim;
          scratch.softmax = {softmax.largest + row, softmax.sums + row};
        }
        AttendQueries(call, heads, tile, scratch,
                      log_sums == nullptr ? nullptr : log_sums + i * spec.seq_q + tile.query);
      }
    }
  };
  ForEachPart(call.team, call.batch * spec.heads, LeastHeads(spec), attend);
}

}  // namespace shardwright
