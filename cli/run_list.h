#pragma once

// Lists of runs (docs/cli.md, "validate"): jobs as flags of `shardwright plan`, or as plan files,
// each with a name and, where it ran, what its step took.

#include <string>
#include <vector>

#include "analysis/measured_run.h"
#include "core/json.h"

namespace shardwright {

struct RunList {
  bool has_bands = false;    // bands are asked for
  bool wants_plans = false;  // plan files instead of predictions
  bool repeats = false;      // step times at points that standard input has (RepeatRuns)
  std::vector<JsonValue> runs;
};

// Does the file begin as a list of runs does?
[[nodiscard]] bool IsRunList(const std::string& file);
[[nodiscard]] RunList ReadRunList(const std::string& file);
// One of its runs with its plan. Throws InputError for a job that cannot be made.
[[nodiscard]] MeasuredRun ReadRun(const JsonValue& run);
// All of them.
[[nodiscard]] std::vector<MeasuredRun> ReadRuns(const RunList& list);

}  // namespace shardwright
