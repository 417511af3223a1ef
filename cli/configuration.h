#pragma once

// Defaults of flags that the user keeps in files and in the environment. A flag on the command line
// wins over the environment, that over the project's file, and that over the user's own
// (docs/cli.md, "config").

#include <string>
#include <vector>

#include "cli/command.h"

namespace shardwright {

// One default and where it was found.
struct ConfiguredFlag {
  std::string command;  // "plan"
  std::string flag;     // "--cluster"
  std::string value;
  std::string origin;   // "shardwright.json", "environment variable SHARDWRIGHT_PLAN_CLUSTER"
  bool is_used = true;  // false: something stronger sets it
};

// The files, strongest first, whether they exist or not.
[[nodiscard]] std::vector<std::string> ConfigurationFiles();

// All defaults, by command and flag, strongest first. Throws InputError for a file that cannot be
// read and for commands and flags that there are not.
[[nodiscard]] std::vector<ConfiguredFlag> ReadConfiguration();

// Sets what is configured for this command and was not given.
void ApplyConfiguration(const Command& command, Arguments& arguments);

}  // namespace shardwright
