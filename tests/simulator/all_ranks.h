#pragma once

// Every rank of a small job simulated, for tests: ranks may have different programs and prices
// (stragglers), and a collective starts when its last member arrives. The loop of
// simulator/engine.h for each rank, side by side.

#include <span>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "simulator/jitter.h"
#include "traces/trace.h"

namespace shardwright {

struct RankProgram {
  const Program* program = nullptr;
  const PriceTable* prices = nullptr;
  // Multiplies the durations of this rank's own device ops, not of collectives; > 0. A straggler
  // has more than 1.
  double slowdown = 1;
};

struct AllRanksOptions {
  bool contention = true;  // a collective is as slow as on its slowest member
  int steps = 3;           // steps to run; >= 1
};

struct AllRanksResult {
  SimTime init;                     // until init is complete on all ranks
  std::vector<SimTime> step_times;  // from the completion of everything before, on all ranks
  std::vector<Span> spans;          // all, by rank, then in issue order; arrival is the rank's own
};

// Runs all ranks; ranks[r] is rank r. Programs must pass VerifyRanks. Throws InputError for more
// than kMostSimulatedRanks ranks, or groups that do not tile the ranks. O(events * ranks).
[[nodiscard]] AllRanksResult RunAllRanks(std::span<const RankProgram> ranks,
                                         const AllRanksOptions& options);

}  // namespace shardwright
