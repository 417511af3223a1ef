#pragma once

#include "cli/command.h"

namespace shardwright {

// Every command has these two. They are not part of its table: no settings file and no environment
// variable lifts what foreign files may cost (core/budget.h).
inline const FlagRow kBudgetFlag = {
    "--budget", "N", "files may cost N times the usual limits on size and rows (1; at most 1000)",
    FileRole::kNone, Ranks::kAny};

inline const SwitchRow kJsonSwitch = {"--json", "machine-readable output", Ranks::kAny};

}  // namespace shardwright
