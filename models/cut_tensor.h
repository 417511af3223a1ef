#pragma once

// Tensor parallel with sequence parallel: `ranks` neighbours cut every layer among them. Between
// layers each has an equal part of a sample's tokens. Inside attention and MLP each has all tokens
// and an equal part of the heads or of the features.
//
//   before  x -> norm -> q, k, v -> attention -> o -> + x
//   after   x -> norm -> gather tokens -> q, k, v -> attention -> o -> scatter sums -> + x
//
// Example: 8 ranks, llama-3-8b, 8,192 tokens. A norm has 1,024 tokens; its weight is whole. q makes
// 4 of the 32 heads of all tokens, k and v 1 of 8. The output of o is a sum over ranks that no rank
// has yet: a reduce-scatter adds it up and leaves each its tokens. Embedding, head and loss have
// an eighth of the vocabulary. A table of positions is whole: a rank looks up those of its tokens.
// Of q, k and v packed in one weight each is cut by itself (Parameter::tensor_sections). An adapter
// of q has A whole and a part of B's outputs; one of o has a part of A's inputs and B whole.
//
// Source: torchtitan v0.2.2, models/llama3/infra/parallelize.py (apply_tp) with loss parallel, and
// its main of 2026-08, components/lora.py; torch 2.13, distributed/tensor/parallel.

#include <cstdint>
#include <string>

#include "models/model.h"

namespace shardwright {

// Makes the model that the first of `ranks` ranks has. Shapes of parameters and sizes of ops are
// local (Parameter::tensor_parts, Model::tensor_ranks), and kGatherTokens and kScatterTokens stand
// where tokens move. Nothing changes for one rank, or where the model is cut so already. `where`
// names the source of `ranks`. Throws InputError for what cannot be cut: heads, vocabulary,
// features or tokens that `ranks` does not divide, and kinds of ops without a rule. Behind
// CutContext. O(ops + parameters).
void CutTensor(Model& model, std::int64_t ranks, const std::string& where);

}  // namespace shardwright
