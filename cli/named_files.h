#pragma once

// Files that a command line names.

#include <span>
#include <string>
#include <vector>

#include "cli/command.h"

namespace shardwright {

struct NamedFile {
  std::string name;  // "--trace" or "PLAN"
  std::string path;
};

// Throws UsageError if an output is one of the inputs, by whatever path, or another output. Only
// regular files count: a terminal may well be both. What an input holds behind its first ':' counts
// as its path, too ("text:book.txt"), and the config.json of a folder.
void RefuseOverwriting(std::span<const NamedFile> inputs, std::span<const NamedFile> outputs);

// The values with a role that reads.
[[nodiscard]] std::vector<NamedFile> InputsOf(const Command& command, const Arguments& arguments);

// Before a command runs: no output overwrites anything that is read, and all of them can be written
// (EnvironmentError), so that no work is lost.
void CheckFiles(const Command& command, const Arguments& arguments);

}  // namespace shardwright
