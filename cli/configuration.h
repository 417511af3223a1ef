#pragma once

// Defaults of flags that the user keeps in files and in the environment. A flag on the command line
// wins over the environment, that over the current folder's file, and that over the user's own
// (docs/cli.md, "config"). Who works in a folder does not vouch for its file: it may belong to
// nobody else, only choose how something is computed or printed, and what it chose is said.

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

// Whether the current folder's file may set this flag of any command.
[[nodiscard]] bool IsChoice(const std::string& flag);

// The files, strongest first, whether they exist or not.
[[nodiscard]] std::vector<std::string> ConfigurationFiles();

// All defaults, by command and flag, strongest first. Throws InputError for a file that cannot be
// read, belongs to another user or may be written by all, and for commands and flags that there are
// not or that the current folder's file may not set.
[[nodiscard]] std::vector<ConfiguredFlag> ReadConfiguration();

// Sets what is configured for this command and was not given; a line on standard error says what
// came from the current folder.
void ApplyConfiguration(const Command& command, Arguments& arguments);

}  // namespace shardwright
