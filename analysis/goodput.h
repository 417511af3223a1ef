#pragma once

// How long a run takes when nodes fail: checkpoints cost time, and so does work that is lost.
//
// Failures are exponential, with the rate of all nodes together; they also strike during
// checkpoints and restarts. Work goes on from the last checkpoint. A stretch of work `t` and its
// checkpoint `c`, each failure followed by a restart `r`, takes, with mean time M between failures,
//
//   E = M e^(r/M) (e^((t + c)/M) - 1)
//
// (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
// Generation Computer Systems 22, 2006, equation 13; exact, by the renewal argument). E / t is
// least where t = M (1 + W(-e^(-c/M - 1))), with Lambert's W; its expansion is Daly's equation 37,
// and for c << M it is sqrt(2 c M) (J. W. Young, Communications of the ACM 17, 1974).

#include <cstdint>

#include "core/units.h"

namespace shardwright {

struct FailureModel {
  Seconds node_mtbf;        // mean time between failures of one node; > 0
  std::int64_t nodes = 1;   // any of which stops the job
  Seconds checkpoint_time;  // the job stands still for it; >= 0
  Seconds restart_time;     // from a failure to the first step; >= 0
};

struct RunEstimate {
  std::int64_t steps = 0;
  std::int64_t interval_steps = 0;  // between checkpoints
  Seconds work;                     // steps x step time
  Seconds expected;                 // with checkpoints, failures and restarts
  double expected_failures = 0.0;
  std::int64_t checkpoints = 0;  // one at the end included
  // Where the rest of the expected time goes.
  Seconds checkpointing;  // of checkpoints that are kept
  Seconds lost;           // restarts, work and checkpoints that failures undo

  // The part of the time that is training: work / expected.
  [[nodiscard]] double Goodput() const { return work.value / expected.value; }
};

// Mean time between failures of the whole job.
[[nodiscard]] Seconds JobMtbf(const FailureModel& model);

// Expected time until a stretch (work and its checkpoint) is done without a failure in between: E
// above. Infinite where it exceeds the range of double.
[[nodiscard]] Seconds ExpectedStretch(Seconds stretch, const FailureModel& model);

// The best stretch of work between checkpoints; 0 when checkpoints cost nothing.
[[nodiscard]] Seconds BestInterval(const FailureModel& model);

// Estimates a run with a checkpoint after every `interval_steps` steps and at the end; 0: as often
// as is best, to a step. Requires positive steps and step time.
[[nodiscard]] RunEstimate EstimateRun(std::int64_t steps, Seconds step_time,
                                      std::int64_t interval_steps, const FailureModel& model);

}  // namespace shardwright
