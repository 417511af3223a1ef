#pragma once

// How step times vary when ranks do not run at equal speed: noise, stragglers, unequal nodes.
//
// Up to kMostSimulatedRanks ranks are followed op by op, each with durations of its own. A
// collective starts when the last of its ranks arrives. Of a larger job as many ranks are followed,
// the slow ones among them. The others only matter at collectives, by the last of them to arrive.
// Its arrival is drawn: the largest of as many normal deviates, with mean and deviation of the
// followed ranks' arrivals. With noise of ranks, one followed rank is as slow as the slowest of the
// others instead. Durations do not depend on the ops beside an op. They are those of the
// undisturbed steady step, contention included.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "traces/trace.h"

namespace shardwright {

inline constexpr std::size_t kMostSimulatedRanks = 64;

// A rank whose own device ops take `factor` times as long; collectives do not.
struct SlowRank {
  std::int64_t rank = 0;
  double factor = 1.0;  // > 0

  bool operator==(const SlowRank&) const = default;
};

struct JitterOptions {
  std::int64_t ranks = 1;   // of the job
  double op_sigma = 0.0;    // relative standard deviation of every duration of every device op
  double rank_sigma = 0.0;  // ... of the speed of a rank in one step
  std::vector<SlowRank> slow_ranks;
  int samples = 200;  // steps
  std::uint64_t seed = 1;
};

struct StepDistribution {
  SimTime nominal;              // the step without noise and slow ranks
  std::vector<SimTime> sorted;  // one time per sample, ascending
  SimTime mean;
  SimTime deviation;  // standard deviation of the samples
  // Mean over ranks and steps of the time between a rank's arrival at a collective and the last
  // arrival, summed over the collectives of a step. Waits of streams that overlap add up.
  SimTime waiting;
  std::int64_t followed = 0;  // ranks simulated one by one

  // The least time that at least the fraction `q` of the samples does not exceed; 0 < q <= 1.
  [[nodiscard]] SimTime Percentile(double q) const;
};

// Samples successive steps (the first few are left out). Noise factors are normal with mean 1, cut
// off at a tenth. `steady` are the spans of one steady step of one rank, in op order; without noise
// and slow ranks every sample takes as long as that step. Tests compare slow ranks alone with a
// loop for each rank (tests/simulator/all_ranks.h). Equal seeds give equal results. Requires a
// program that Verify accepts. Throws InputError for a slow rank outside of the job. O(samples *
// ops * followed ranks).
[[nodiscard]] StepDistribution SampleSteps(const Program& program, const PriceTable& prices,
                                           std::span<const Span> steady,
                                           const JitterOptions& options);

// x with P(z <= x) = 1 - tail for a standard normal z; 0 < tail < 1.
[[nodiscard]] double NormalUpperQuantile(double tail);

}  // namespace shardwright
