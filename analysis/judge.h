#pragma once

// Holds what a log says of a run's steps against the prediction of its plan, and looks for what
// would explain the difference.
//
// Example: a plan is predicted at 3.63 s +- 15 %, its log says 5.1 s. With the network at 0.12 of
// its rate the simulated step takes 5.1 s; with every block recomputed 4.6 s, and 24 GiB less. The
// log's memory is as predicted, so the network comes first.

#include <optional>
#include <string>
#include <vector>

#include "analysis/step_log.h"
#include "core/units.h"
#include "schedule/plan_file.h"

namespace shardwright {

// Something that a run may do otherwise than its plan says.
struct Cause {
  std::string name;             // "the network has 12 % of its rate"
  std::string check;            // what to measure next to be sure
  Seconds step_time;            // simulated with the cause, for as many tokens as the plan's
  std::optional<Bytes> memory;  // of one GPU, as the log counts it; nothing: as the plan's
  double mismatch = 0;          // smaller is likelier (JudgeLog says how it is made)
};

struct Judgement {
  Seconds measured;  // of a step with as many tokens as the plan's
  Seconds predicted;
  double band = 0;  // relative half-width in which 90 % of such runs lie
  std::optional<Bytes> measured_memory;
  Bytes predicted_memory;     // as the log counts it: reserved or allocated
  Bytes memory_error;         // by how much the prediction of memory may be off
  std::string assumed;        // how an ambiguous rate was read; empty: it was not
  std::vector<Cause> causes;  // likeliest first; empty where all is as predicted

  [[nodiscard]] double Difference() const { return Ratio(measured, predicted) - 1; }
  [[nodiscard]] bool IsTimeAsPredicted() const;
  [[nodiscard]] bool IsMemoryAsPredicted() const;
};

// Simulates the plan once, and each cause once or, to find how strong it must be, a dozen times.
// A cause's mismatch adds up squares:
//   ln(simulated / measured step time) / 0.03, since two runs of one job differ by 3 %;
//   (simulated - measured memory) / error of memory, if the log has memory;
//   ln(strength / usual strength) / ln(spread), of a slow network, links, GPU or host;
//   1 for a cause that is there or not, such as recomputation.
// Causes that explain less than a third of the difference are left out. Throws InputError for a
// plan that cannot be simulated.
[[nodiscard]] Judgement JudgeLog(const PlanFile& file, const StepLog& log);

}  // namespace shardwright
