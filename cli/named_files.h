#pragma once

// Files that a command line names.

#include <span>
#include <string>

#include "cli/command.h"

namespace shardwright {

struct NamedFile {
  std::string name;  // "--trace" or "PLAN"
  std::string path;
};

// Throws UsageError if an output is a file that the command has read or names as an input, by
// whatever path, or another output. Only regular files count: a terminal may well be both.
void RefuseOverwriting(std::span<const NamedFile> outputs);

// Before a command runs: no output overwrites anything that is read, and all of them can be written
// (EnvironmentError), so that no work is lost. What an input holds behind its first ':' counts as
// its path, too ("text:book.txt"), and the config.json of a folder.
void CheckFiles(const Command& command, const Arguments& arguments);

}  // namespace shardwright
