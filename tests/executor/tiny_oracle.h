#pragma once

// What training the tiny network gives in fp64, with a bound for the executor's numbers
// (bounded.h): one oracle for every way to cut the batch into ranks, micro-batches and replicas.

#include "tests/executor/bounded.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {

// The weights behind `setup.steps` steps from the first weights that the executor gives them; of
// aliases none. Frozen and tied parameters, clipping, every optimizer with a constant learning
// rate, and 16-bit compute and reduction as far as no step is skipped.
[[nodiscard]] Weights TinyOracle(const Setup& setup);

}  // namespace shardwright::testing
