#pragma once

// What training adds to a model: adapters (LoRA, DoRA) and copies of modules that learn whole.

#include <vector>

#include "models/model.h"
#include "models/trainable.h"

namespace shardwright {

// What training adds to one module: the adapter's matrices (and DoRA's magnitudes) with their own
// modules, none where they belong to it; or a copy that learns whole.
struct Added {
  bool has_adapter = false;
  bool is_saved = false;
  std::int64_t in = 0;
  std::int64_t out = 0;
  ParamId a = {};
  ParamId b = {};
  ParamId magnitude = {};
  ModuleId module_a = {};
  ModuleId module_b = {};
  ModuleId module_magnitude = {};
  ModuleId copy = {};
  OpSpec experts = {};  // that have an adapter of this rank, in these tensors
  std::int64_t expert_rank = 0;
  std::vector<ParamId> stacks = {};
};
// By module; most modules have nothing.
using Additions = std::vector<Added>;

// Modules that are registered more than once.
[[nodiscard]] std::vector<bool> SharedModules(const Model& model);

// Puts modules, parameters and ops of the additions into the model.
void InsertAdditions(Model& model, const TrainableSpec& spec, const std::vector<bool>& is_shared,
                     Additions& additions);

}  // namespace shardwright
