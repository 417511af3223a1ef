#pragma once

#include "cli/command.h"

namespace shardwright {

// Parses the command line (its first word is the program's name) and runs what it asks for; returns
// the exit code. Only what can be told
// from the words alone is checked here. Throws UsageError with one line (flags and subcommands that
// are nearly right are named), and whatever the command throws.
int RunCommandLine(int argc, const char* const* argv, const Streams& streams = StandardStreams());

}  // namespace shardwright
