#pragma once

// Between units of a plan and classes of modules, which is what most frameworks wrap by.

#include <cstdint>
#include <string>
#include <vector>

#include "models/model.h"
#include "schedule/plan.h"

namespace shardwright {

// Classes of which every instance is the only module of some unit; sorted by name.
[[nodiscard]] std::vector<std::string> UnitClasses(const Model& model,
                                                   const std::vector<UnitPlan>& units);

// What transformers calls the model's _no_split_modules: the repeated layer, and of encoders the
// embeddings, too. Empty for a model without repeated layers.
[[nodiscard]] std::vector<std::string> NoSplitClasses(const Model& model);

// The width of the residual stream, which transformers calls hidden_size: that of the widest norm
// in the first repeated layer; 0 where there is none.
[[nodiscard]] std::int64_t HiddenSize(const Model& model);

// The modules of these classes, children before their parents.
[[nodiscard]] std::vector<ModuleId> InstancesOf(const Model& model,
                                                const std::vector<std::string>& classes);

// One unit for each of these modules. The root is not added.
[[nodiscard]] std::vector<UnitPlan> UnitsOfModules(const Model& model,
                                                   const std::vector<ModuleId>& modules);

// The last unit of every plan; freed after forward or not.
[[nodiscard]] UnitPlan RootUnitOf(Reshard::Kind reshard);

// One fully recomputed region for each of these modules, those inside another one left out.
[[nodiscard]] std::vector<RecomputeRegion> FullRecompute(const Model& model,
                                                         const std::vector<ModuleId>& modules);

// Does the plan recompute each instance of Model::block_classes in full, and nothing else?
[[nodiscard]] bool RecomputesEveryBlock(const Model& model, const Plan& plan);

}  // namespace shardwright
