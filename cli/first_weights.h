#pragma once

// Words about the weights that a run starts from, or does not.

#include <string>

#include "executor/checkpoint/hub_weights.h"

namespace shardwright {

// Names on standard error a few tensors of `path` that no parameter of the model takes.
void WarnOfUnused(const std::string& path, const HubWeights& weights);

// One line on standard error when the folder that `path` is, or lies in, holds weights, which
// nothing but --init reads.
void NoteWeightsBeside(const std::string& path);

}  // namespace shardwright
