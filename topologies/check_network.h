#pragma once

#include "topologies/cluster.h"
#include "topologies/profile.h"

namespace shardwright {

// Throws InputError, with the nearest name, for a cluster whose network is neither a row of the
// profile nor one of the profile "generic" that this one lacks and "default" stands in for.
void CheckNetwork(const Cluster& cluster, const Profile& profile);

}  // namespace shardwright
