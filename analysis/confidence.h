#pragma once

#include <string>
#include <string_view>

#include "schedule/plan_file.h"

namespace shardwright {

// How far a predicted step time may be believed.
struct Confidence {
  // The published runs behind the profile: "6 runs on h100-80 are known, torch-eager on other GPUs
  // only".
  std::string text;
  // Relative half-width of the band of the step time that holds at least 8 of 10 such runs.
  double band = 0;
  // Of analysis/bands.json; "source": a publisher whose other runs are known; "own": a profile of
  // the user's.
  std::string kind;
};

// Of a normal distribution: half-width of the 90 % band over the standard deviation.
inline constexpr double kBandPerDeviation = 1.6449;

// Of a run of `source` (MeasuredRun::Source; a user's own is none that fits know): StepTimeBand,
// which knows how the profile's numbers spread, but of shipped profiles no less than what was seen.
// For a source and stack that the profile was fitted to that is what its other models were off
// while they were left out; for all others the kind's in analysis/bands.json (docs/cost_model.md).
// Costs what StepTimeBand does, and throws as it does.
[[nodiscard]] Confidence ConfidenceOf(const PlanFile& file, std::string_view source = {});
// "8 of 10 such runs are within 13.0 %; 6 runs on h100-80 are known".
[[nodiscard]] std::string HowSure(const Confidence& confidence);
// Confidence::text alone, which costs nothing.
[[nodiscard]] std::string ConfidenceText(const PlanFile& file);

}  // namespace shardwright
