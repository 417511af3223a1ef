#pragma once

// A model as PyTorch's print(model) shows it, with repeated neighbours folded into one.

#include <string>
#include <vector>

#include "models/model.h"
#include "schedule/plan.h"
#include "schedule/program.h"

namespace shardwright {

// What is written about each module, by module id.
struct ModuleNotes {
  std::vector<std::string> class_names;
  std::vector<std::string> comments;  // behind "  # "; empty: none
};

// The model alone.
[[nodiscard]] ModuleNotes PlainNotes(const Model& model);

// The model under a plan: unit modules carry the class that the dialect gives them
// (FSDPLlamaDecoderLayer for fsdp2, FullyShardedDataParallel(LlamaDecoderLayer) for fsdp1, DDP for
// the whole) and a comment on their unit and recomputation. `program` is what the plan lowers to.
[[nodiscard]] ModuleNotes PlanNotes(const Model& model, const Plan& plan, const Program& program);

// Lines of the tree, ending in a newline. O(modules * depth).
[[nodiscard]] std::string ModuleTree(const Model& model, const ModuleNotes& notes);

}  // namespace shardwright
