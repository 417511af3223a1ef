#pragma once

// What lies around a model's blocks.

#include <vector>

#include "models/model.h"

namespace shardwright::internal {

// The parts of a model around its blocks that the frameworks treat specially.
struct Ends {
  ModuleId embedding;  // of the first token lookup
  ModuleId norm;       // the norm whose output the head reads
  ModuleId head;       // the linear whose output the loss reads
  bool head_is_tied = false;
};

// The parameter that holds the elements: the one that `param` is tied to, or itself.
[[nodiscard]] ParamId StorageOf(const Model& model, ParamId param);

// What is not there stays invalid. O(ops * blocks).
[[nodiscard]] Ends FindEnds(const Model& model, const std::vector<ModuleId>& blocks);

}  // namespace shardwright::internal
