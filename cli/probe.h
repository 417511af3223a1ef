#pragma once

// What this machine can tell about itself, without privileges.

#include <optional>
#include <string>
#include <vector>

#include "topologies/import_topology.h"

namespace shardwright {

struct ProbedMachine {
  std::vector<std::string> seen;             // one fact each, with where it was seen
  std::vector<std::string> not_seen;         // what was looked for in vain, and why
  std::optional<ImportedTopology> topology;  // nothing without GPUs
};

// Asks /proc and /sys, and nvidia-smi where it is installed. `options` win over what is seen.
[[nodiscard]] ProbedMachine ProbeMachine(TopologyOptions options);

}  // namespace shardwright
