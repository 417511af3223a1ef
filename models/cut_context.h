#pragma once

// Context parallel: `ranks` neighbours read the same samples, and each has an equal part of the
// tokens. Weights are whole. Attention alone needs the other ranks' tokens: it gathers their keys
// and values.
//
//   before  x -> q, k, v -> attention                    -> o
//   after   x -> q, k, v -> gather k, gather v -> attention of a part of the queries -> o
//
// In a ring attention itself meets the keys and values of one rank after the other. By kUlysses q,
// k and v are exchanged for all tokens of some heads, and the result back.
//
// Example: 4 ranks, 8,192 tokens, 8 pieces of 1,024. Rank 0 has pieces 0 and 7, rank 1 pieces 1 and
// 6, and so on. So a causal mask leaves each rank as many pairs of queries and keys: a quarter.
//
// Source: torchtitan, distributed/context_parallel, 2026-08-21; torch 2.13,
// distributed/tensor/experimental/_context_parallel (head-tail load balancer).

#include <cstdint>
#include <string>

#include "models/model.h"

namespace shardwright {

// Does attention meet the keys and values of one rank after the other?
[[nodiscard]] constexpr bool IsRing(ContextMethod method) {
  return method == ContextMethod::kRing || method == ContextMethod::kRingGather;
}

// Makes the model that each of `ranks` ranks has: ops of fewer rows, and kGatherTokens in front of
// attention by kGather. Nothing changes for one rank, or where the model is cut so already. `where`
// names the source of `ranks`. Throws InputError for tokens that do not make 2 pieces per rank, for
// attention of other inputs than q, k and v of one sequence, and for kinds of ops without a rule.
// O(ops + tensors).
void CutContext(Model& model, std::int64_t ranks, ContextMethod method, const std::string& where);

}  // namespace shardwright
