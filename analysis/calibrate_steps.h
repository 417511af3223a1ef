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
// deviation): rows that the fits of shipped profiles know are 2 to 3 % off.
inline constexpr double kStepNoise = 0.02;

// Numbers are taken to be independent and normally distributed (in logarithms) around those of
// `start`, with its spreads, widened until the band of these runs is what ConfidenceOf says of
// them; runs are kStepNoise away from what the right numbers predict. The most probable numbers are
// returned, with spreads that make the band of these runs what is left to doubt. Numbers without a
// spread stay. Throws InputError where a run cannot be mapped, has no step time, or is on another
// GPU than the first.
[[nodiscard]] CalibrationResult CalibrateSteps(const std::vector<MeasuredRun>& runs,
                                               const Profile& start, const Origin& origin);

}  // namespace shardwright
