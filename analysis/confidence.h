#pragma once

#include <string>
#include <string_view>

#include "schedule/plan_file.h"

namespace shardwright {

// How far a predicted step time may be believed.
struct Confidence {
  // Which profile it is and what it was fitted to, in one line.
  std::string text;
  // Relative half-width of the 90 % band of the step time.
  double band = 0;
};

// What the step of a run that no fit has seen differs from its prediction, in logarithms: one draw
// for all runs of one source on one GPU (its host, network, software, extra work), one for each
// run's shape, and one for the chip where no step on its kind was ever fitted, a larger one where
// nothing of it was measured at all. Standard deviations, estimated from the rows of each source
// while it was left out of all fits, groups of one source on one GPU counting alike; from MI300X's
// steps by its kernels alone; and from each chip by the profile of no GPU in particular
// (scripts/left_out.py, docs/cost_model.md, "Bands").
struct NewRunSpread {
  double source = 0.0515;
  double shape = 0.0775;
  double chip_without_steps = 0.14;
  double chip = 0.58;
};
inline constexpr NewRunSpread kNewRunSpread;
// Of a normal distribution: half-width of the 90 % band over the standard deviation.
inline constexpr double kBandPerDeviation = 1.6449;

// Of a run of `source` (MeasuredRun::Source; a user's own is none that fits know): StepTimeBand,
// which knows how the profile's numbers spread, but of shipped profiles no less than what was seen.
// For a source and stack that the profile was fitted to that is what its other models were off
// while they were left out; for all others kNewRunSpread. Costs what StepTimeBand does, and throws
// as it does.
[[nodiscard]] Confidence ConfidenceOf(const PlanFile& file, std::string_view source = {});
// The text alone, which costs nothing.
[[nodiscard]] std::string ConfidenceText(const PlanFile& file);

}  // namespace shardwright
