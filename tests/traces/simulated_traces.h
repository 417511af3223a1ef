#pragma once

// Traces of random lowered programs under random prices, for property tests.

#include <random>
#include <string>

#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright::testing {

struct SimulatedTrace {
  Program program;
  Trace trace;
  std::string description;  // for failure messages
};

// One rank, or with `all_ranks` every rank of the job, some of them slower than others. Prices are
// arbitrary picoseconds, many of them shorter than a nanosecond or 0.
[[nodiscard]] SimulatedTrace DrawTrace(std::mt19937& random, bool all_ranks);

}  // namespace shardwright::testing
