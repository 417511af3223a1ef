#pragma once

// Weights of others as a checkpoint of ours.

#include <string>

#include "executor/checkpoint/hub_weights.h"
#include "models/model.h"

namespace shardwright {

// Writes the checkpoint of step 0 into `folder`, which must hold none, in the dtypes of the files,
// without optimizer states. Returns its folder. Throws InputError and EnvironmentError.
[[nodiscard]] std::string ImportWeights(const HubWeights& weights, const Model& model,
                                        const std::string& folder);

}  // namespace shardwright
