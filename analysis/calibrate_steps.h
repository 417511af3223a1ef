#pragma once

// Profiles from step times alone: the least change of a profile's numbers that explains what one
// run, or a few, took. docs/compare.md, "From step times".

#include <vector>

#include "analysis/calibrate.h"
#include "analysis/measured_run.h"
#include "topologies/number.h"
#include "topologies/profile.h"

namespace shardwright {

// What a run's step differs from a prediction with the right numbers, as a part of it (one standard
// deviation): rows of models that their fits did not know are 3.9 % off in the mean
// (bench/accuracy.md, section 1), which is 0.8 of a normal distribution's deviation.
inline constexpr double kStepNoise = 0.05;

// Numbers are taken to be independent and normally distributed (in logarithms) around those of
// `start`, with its spreads, widened until the band of these runs is what ConfidenceOf says of
// them; runs are kStepNoise away from what the right numbers predict. The most probable numbers are
// returned, with spreads that make the band of these runs what is left to doubt. Numbers without a
// spread stay. Throws InputError where a run has no step time, or is on another GPU than the
// first.
[[nodiscard]] CalibrationResult CalibrateSteps(const std::vector<MeasuredRun>& runs,
                                               const Profile& start, const Origin& origin);

}  // namespace shardwright
