#pragma once

#include <string>

#include "models/model.h"

namespace shardwright {

// The op's name for messages: its module's FQN, and its own name where the module has several ops.
[[nodiscard]] std::string OpLabel(const Model& model, const ModelOp& op);

// Throws InputError naming `where` unless every tensor is produced before the op that reads it.
// Tells a cycle (with the ops on it) from a mere disorder. Needs only ops, tensors and modules.
void CheckExecutionOrder(const Model& model, const std::string& where);

}  // namespace shardwright
