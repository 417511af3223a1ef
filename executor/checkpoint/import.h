#pragma once

// Weights of others as a checkpoint of ours.

#include <string>

#include "executor/checkpoint/hub_weights.h"
#include "models/model.h"

namespace shardwright {

// Writes a checkpoint into `folder`, which must hold none, in the dtypes of the files: of step 0,
// or where they hold optimizer states, of as many steps as updates were done. Returns its folder.
// Throws InputError and EnvironmentError.
[[nodiscard]] std::string ImportWeights(const HubWeights& weights, const Model& model,
                                        const std::string& folder);

}  // namespace shardwright
