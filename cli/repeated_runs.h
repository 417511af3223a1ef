#pragma once

// Runs that are predicted again and again by other numbers, as the fits of bench/fit.py ask.

#include "cli/command.h"
#include "cli/run_list.h"

namespace shardwright {

// Prints a line about the runs of the list. Then answers each line of standard input, points and
// which runs to predict at which of them, with a line of step times; bench/README.md has both.
// Throws InputError for a run that cannot be made or a number that its profile lacks.
void RepeatRuns(const RunList& list, const Arguments& arguments);

}  // namespace shardwright
