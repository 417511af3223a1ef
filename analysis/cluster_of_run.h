#pragma once

#include <string>
#include <vector>

#include "analysis/measured_run.h"
#include "topologies/cluster.h"

namespace shardwright {

// The cluster of a row: GPUs of its class in nodes with the network it names. What a row leaves
// open is taken from what such machines usually have, and appended to `notes`. Throws InputError.
[[nodiscard]] Cluster ClusterOfRun(const MeasuredRun& run, std::vector<std::string>& notes);

}  // namespace shardwright
