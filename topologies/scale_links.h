#pragma once

// What-if on a cluster: links faster or slower than they are.

#include <string>
#include <string_view>
#include <vector>

#include "topologies/cluster.h"

namespace shardwright {

// The levels that ScaleLinks knows of this cluster: "nvlink" and "pcie" (links inside a node),
// "network" (the NICs and the links that join them to the node), and the names of fabric levels
// with uplinks of their own. Only those that exist.
[[nodiscard]] std::vector<std::string> LinkLevels(const Cluster& cluster);

// Multiplies the bandwidth of all links of a level, in both directions, by `factor` > 0; of a
// fabric level that of its uplinks. What hangs on the NICs (rates of uplinks follow the nodes')
// scales with "network". Throws InputError at `where` for a level that the cluster does not have,
// with the nearest. O(links).
void ScaleLinks(Cluster& cluster, std::string_view level, double factor, std::string_view where);

}  // namespace shardwright
