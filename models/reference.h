#pragma once

// Models of losses that compare answers: a frozen reference beside the one that learns, a score in
// the place of the head.

#include <cstdint>

#include "core/error.h"
#include "models/model.h"
#include "models/trainable.h"

namespace shardwright {

// The FQN of the reference's root, which has no parent: a forest of two trees.
inline constexpr const char* kReferenceRoot = "reference";

// Is the module the reference's root, or below it?
[[nodiscard]] bool IsOfReference(const Model& model, ModuleId module);

// Adds the forwards without gradients that a step of `spec.trains_by` runs beside the model's own:
// of a reference behind it (DPO); of mismatched answers before it and before the reference's (KTO);
// of the policy and of the reference before it, as `spec.rollout` has them (GRPO). The reference of
// adapters is their frozen base, whose modules are called once more. Otherwise modules and
// parameters are copied, frozen, below kReferenceRoot. Dropouts are left out: the reference is
// evaluated. O(modules + params + ops).
void AddForwards(Model& model, const TrainableSpec& spec);

// Head and loss read the last `tokens` rows alone; 0: half of them. Throws InputError at `where`
// for a model that has fewer, or whose loss no linear layer feeds. O(ops).
void ScoreCompletions(Model& model, std::int64_t tokens, const Path& where);

// Puts "score", a linear layer with one output and no bias, in the place of the head, as
// transformers' models for sequence classification have it. Throws InputError at `where` for a
// model whose loss no linear layer feeds. O(ops).
void AddScore(Model& model, const Path& where);

}  // namespace shardwright
