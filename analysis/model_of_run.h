#pragma once

#include <string>
#include <vector>

#include "analysis/measured_run.h"
#include "schedule/plan.h"
#include "schedule/plan_file.h"

namespace shardwright {

// The model of a row, built for `job.sequence_length`: from its dimensions, or, where a row has
// none, the zoo model of the same name. `dropout` is that of GPT models. Appends to `notes` what is
// only near. Throws InputError.
[[nodiscard]] LoadedModel ModelOfRun(const MeasuredRun& run, const Job& job, double dropout,
                                     std::vector<std::string>& notes);

}  // namespace shardwright
