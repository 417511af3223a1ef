#pragma once

// The subcommands. Each prepares all of its output before it writes any, so that a failure leaves
// none; results go to standard output, warnings to standard error. The return value is the exit
// code (cli/exit_codes.h); errors are thrown.

#include <string>

#include "cli/command_line.h"

namespace shardwright {

int RunList(const ListCommand& options);
int RunInspect(const InspectCommand& options);
int RunPlan(const PlanCommand& options);
int RunSimulate(const SimulateCommand& command);

// Runs whatever was parsed.
int RunCommand(const CommandLine& command);

// "warning: <text>" on standard error.
void Warn(const std::string& text);

}  // namespace shardwright
