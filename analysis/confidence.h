#pragma once

#include <string>

#include "schedule/plan_file.h"

namespace shardwright {

// How far a predicted step time may be believed.
struct Confidence {
  // Which profile it is and what it was fitted to, in one line.
  std::string text;
  // Relative half-width of the 90 % band of the step time: StepTimeBand, which knows how the
  // profile's numbers spread, but no less than what new jobs have shown: the error on models that
  // were left out of the fit; kUnknownStackBand where no run has the kernel set; kUnknownBand where
  // no run on the GPU is behind the profile.
  double band = 0;
};

// Holds 20 of the 22 published runs of stacks to which nothing was fitted (the validation set of
// bench/protocol.json, 2026-11-26).
inline constexpr double kUnknownStackBand = 0.13;
inline constexpr double kUnknownBand = 0.25;

// Costs what StepTimeBand does, and throws as it does.
[[nodiscard]] Confidence ConfidenceOf(const PlanFile& file);
// The text alone, which costs nothing.
[[nodiscard]] std::string ConfidenceText(const PlanFile& file);

}  // namespace shardwright
