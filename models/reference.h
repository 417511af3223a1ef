#pragma once

// Models of losses that compare answers: a frozen reference beside the one that learns, a score in
// the place of the head.

#include "core/error.h"
#include "models/model.h"

namespace shardwright {

// The FQN of the reference's root, which has no parent: a forest of two trees.
inline constexpr const char* kReferenceRoot = "reference";

// Is the module the reference's root, or below it?
[[nodiscard]] bool IsOfReference(const Model& model, ModuleId module);

// Appends the reference's forward, without gradients, behind the model's own. The reference of
// adapters is their frozen base: its modules are called once more, and need no memory of their own.
// Otherwise modules and parameters are copied, frozen, below kReferenceRoot. Dropouts are left out:
// the reference is evaluated. With `has_mismatched` a forward over mismatched answers (KTO's) runs
// before the model's own and before the reference's. O(modules + params + ops).
void AddReference(Model& model, bool has_adapters, bool has_mismatched);

// Puts "score", a linear layer with one output and no bias, in the place of the head, as
// transformers' models for sequence classification have it. Throws InputError at `where` for a
// model whose loss no linear layer feeds. O(ops).
void AddScore(Model& model, const Path& where);

}  // namespace shardwright
