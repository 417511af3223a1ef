#pragma once

#include <string>
#include <vector>

#include "topologies/cluster.h"

namespace shardwright {

// What a profile's `architecture` may say to be of this GPU, the nearest first: its name, then
// "ada-half" for cards of an architecture whose tensor cores add in fp32 at half rate, then "ada".
[[nodiscard]] std::vector<std::string> ProfileTargets(const GpuSpec& gpu);

}  // namespace shardwright
