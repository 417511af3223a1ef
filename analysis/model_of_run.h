#pragma once

#include <string>
#include <vector>

#include "analysis/measured_run.h"
#include "analysis/stack.h"
#include "schedule/plan.h"
#include "schedule/plan_file.h"

namespace shardwright {

// The model of a row, built for `job.sequence_length`: from its dimensions, or, where a row has
// none, the zoo model of the same name. The stack says what its GPT models are like. Appends to
// `notes` what is only near. Throws InputError.
[[nodiscard]] LoadedModel ModelOfRun(const MeasuredRun& run, const Job& job, const Stack& stack,
                                     std::vector<std::string>& notes);

}  // namespace shardwright
