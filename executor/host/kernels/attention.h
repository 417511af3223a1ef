#pragma once

// What the forward and the backward half of attention share: which pairs of a query and a key are
// visible, and a tile of scores.

#include <cstdint>
#include <span>

#include "executor/host/kernels/gemm.h"
#include "executor/op_layout.h"

namespace shardwright {

// Rows of head `h` from `r` on, as (rows, features) and transposed.
[[nodiscard]] GemmOperand RowsAt(const HeadPlace& place, std::int64_t r, std::int64_t h);
[[nodiscard]] GemmOperand ColumnsAt(const HeadPlace& place, std::int64_t r, std::int64_t h);

// The call with the keys and values that a step of a ring meets, as many as its queries; `spec`
// becomes its spec. Without a ring the call as it is.
[[nodiscard]] ModelOpCall AtRingStep(const ModelOpCall& call, OpSpec& spec);

// Keys [begin, end) that a query sees.
struct KeyRange {
  std::int64_t begin = 0, end = 0;
};
[[nodiscard]] KeyRange VisibleKeys(const ModelOpCall& call, std::int64_t query);

// Queries [query, query + queries) by keys [key, key + keys) of one head of one sample.
struct AttentionTile {
  std::int64_t sample = 0, head = 0;
  std::int64_t query = 0, queries = 0;
  std::int64_t key = 0, keys = 0;
};
// The columns of the tile that row `i` sees.
[[nodiscard]] KeyRange VisibleColumns(const ModelOpCall& call, const AttentionTile& tile,
                                      std::int64_t i);
// The tile from `key` on that holds all keys that any of its queries sees, at most
// kAttentionKeys; no keys: no further tile.
[[nodiscard]] AttentionTile NextTile(const ModelOpCall& call, AttentionTile tile);

// What is multiplied into q k^T: the spec's factor, or 1 / sqrt(head_dim).
[[nodiscard]] float ScoreFactor(const OpSpec& spec);
// The ALiBi slope of a head, 0 without. Source: Press et al., arXiv 2108.12409, and MPT's
// gen_slopes for head counts that are no powers of two.
[[nodiscard]] float AlibiSlope(const OpSpec& spec, std::int64_t head);

// Heads of samples that are worth a thread.
[[nodiscard]] std::int64_t LeastHeads(const OpSpec& spec);

// scores (queries, keys) = q k^T times the factor, capped. `capped` (null: not wanted) gets a copy.
// Then the position bias and the ALiBi term are added. Only visible columns are defined.
void ComputeScores(const ModelOpCall& call, const HeadPlaces& heads, const AttentionTile& tile,
                   float* scores, float* capped, std::span<std::byte> workspace);

// Dropout factors of the visible columns of row `i`, into factors[begin, end).
void AttentionDropout(const ModelOpCall& call, const AttentionTile& tile, std::int64_t i,
                      KeyRange columns, float* factors);

}  // namespace shardwright
