#pragma once

// Random plans for the tiny network of tiny_training.h.

#include <random>

#include "tests/executor/harness.h"

namespace shardwright::testing {

// One draw: dialect, ranks (at most 4, replicas of shards included), micro-batches, units, reshard,
// recompute, offload, prefetch. The plan is one that the dialect accepts.
[[nodiscard]] Setup RandomTinySetup(std::mt19937& random);

}  // namespace shardwright::testing
