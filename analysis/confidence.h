#pragma once

#include <string>

#include "schedule/plan_file.h"

namespace shardwright {

// How far a predicted step time may be believed.
struct Confidence {
  // Which profile it is and what it was fitted to, in one line.
  std::string text;
  // Relative half-width of the band of the step time: StepTimeBand; at least kUnknownBand where no
  // run on the GPU is behind the profile.
  double band = 0;
};

inline constexpr double kUnknownBand = 0.25;

// Costs what StepTimeBand does, and throws as it does.
[[nodiscard]] Confidence ConfidenceOf(const PlanFile& file);
// The text alone, which costs nothing.
[[nodiscard]] std::string ConfidenceText(const PlanFile& file);

}  // namespace shardwright
