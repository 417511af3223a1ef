#pragma once

namespace shardwright {

// Parses the command line and runs what it asks for; returns the exit code. Only what can be told
// from the words alone is checked here. Throws UsageError with one line (flags and subcommands that
// are nearly right are named), and whatever the command throws.
int RunCommandLine(int argc, const char* const* argv);

}  // namespace shardwright
