#pragma once

#include "core/units.h"
#include "schedule/plan_file.h"

namespace shardwright {

// What we say about a run before we look at what was measured.
struct RunPrediction {
  Seconds step_time;
  Bytes allocated;  // peak, the larger of first and later steps
  Bytes reserved;   // peak of the caching allocator's segments
  Bytes outside;    // context and communicators
  Bytes usable;     // of the device
  bool out_of_memory = false;

  // Usable memory that would be left, negative for what is missing: usable - outside - allocated.
  // Fragmentation is not counted, so that the margin is defined for plans that do not fit, too.
  [[nodiscard]] Bytes Margin() const { return usable - outside - allocated; }
};

// Lowers and simulates a plan. Throws InputError for a plan that its dialect cannot express.
[[nodiscard]] RunPrediction PredictRun(const PlanFile& file);

// Relative half-width of the band in which the step time lies, by the spreads of the profile's
// numbers: each is moved by its spread on its own, and the changes of the time are added in
// squares, as for independent errors. Numbers without a spread count as exact. Costs one simulation
// without allocator per number (NumberPaths). Throws as PredictRun does.
[[nodiscard]] double StepTimeBand(const PlanFile& file);

}  // namespace shardwright
