#pragma once

// Hand-made module trees for tests of plans: no ops, only what decides which unit owns what.

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "models/model.h"

namespace shardwright::testing {

// Adds a module under `parent` (none: the root) and returns its id.
inline ModuleId AddModule(Model& model, ModuleId parent, const std::string& name,
                          const std::string& class_name = "Module") {
  const ModuleId id(model.modules.size());
  Module module;
  module.name = name;
  module.class_name = class_name;
  module.parent = parent;
  if (parent.valid()) {
    const std::string& above = model.modules[parent.value].fqn;
    module.fqn = above.empty() ? name : above + "." + name;
    model.modules[parent.value].children.push_back(id);
  }
  model.modules.push_back(std::move(module));
  return id;
}

inline ParamId AddParam(Model& model, ModuleId module, const std::string& name,
                        std::vector<std::int64_t> shape, ParamId tied_to = {}) {
  const ParamId id(model.params.size());
  Parameter param;
  const std::string& fqn = model.modules[module.value].fqn;
  param.fqn = fqn.empty() ? name : fqn + "." + name;
  param.shape = std::move(shape);
  param.module = module;
  param.tied_to = tied_to;
  model.params.push_back(std::move(param));
  model.modules[module.value].params.push_back(id);
  return id;
}

// root { embed.weight, layers { 0 { scale, lin { weight, bias } }, 1 { the same } }, norm.weight,
// head.weight (tied to embed.weight if asked) }, in this registration order.
inline Model TinyModel(bool tied = false) {
  Model model;
  model.name = "tiny";
  model.block_classes = {"Block"};
  const ModuleId root = AddModule(model, {}, "", "Tiny");
  const ModuleId embed = AddModule(model, root, "embed", "Embedding");
  const ParamId table = AddParam(model, embed, "weight", {8, 4});
  const ModuleId layers = AddModule(model, root, "layers", "ModuleList");
  for (int i = 0; i < 2; ++i) {
    const ModuleId block = AddModule(model, layers, std::to_string(i), "Block");
    AddParam(model, block, "scale", {4});
    const ModuleId lin = AddModule(model, block, "lin", "Linear");
    AddParam(model, lin, "weight", {4, 4});
    AddParam(model, lin, "bias", {4});
  }
  AddParam(model, AddModule(model, root, "norm", "RMSNorm"), "weight", {4});
  AddParam(model, AddModule(model, root, "head", "Linear"), "weight", {8, 4},
           tied ? table : ParamId());
  return model;
}

}  // namespace shardwright::testing
