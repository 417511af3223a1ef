#pragma once

#include <string>

#include "analysis/calibration_samples.h"
#include "analysis/run_match.h"
#include "cli/device_calibration.h"

namespace shardwright {

// A trace of `shardwright run` or `simulate`, with the plan that it carries. Throws InputError for
// a trace without one.
[[nodiscard]] TracedRun ReadOwnTrace(const std::string& file);

// What Calibrate takes; refers to `run`.
[[nodiscard]] CalibrationRun CalibrationRunOf(const TracedRun& run);

// Of recordings of other profilers, which do not say what they ran; no groups for the rest.
[[nodiscard]] RunMatch MatchOf(const TracedRun& run);

// What a trace of our own holds that its program could not do, a line each; a profile of it would
// be wrong.
[[nodiscard]] std::string ContradictionsOf(const TracedRun& run);

}  // namespace shardwright
