#pragma once

// A slow simulator for tests, written apart from the engines: it lists every constraint of
// docs/execution_model.md between op times and raises the times until all constraints hold.

#include <cstdint>
#include <vector>

#include "schedule/program.h"
#include "simulator/costs/price.h"

namespace shardwright {

struct ReferenceTime {
  std::int64_t issued = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
};

struct ReferenceResult {
  std::vector<std::vector<ReferenceTime>> bodies;  // init, first step, second step, ...
  std::vector<std::int64_t> fronts;                // when everything up to each body is complete
};

// Runs init and `steps` steps without contention. O((ops * steps)^2).
[[nodiscard]] ReferenceResult RunReference(const Program& program, const PriceTable& prices,
                                           int steps);

}  // namespace shardwright
