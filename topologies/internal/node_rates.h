#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/units.h"
#include "topologies/cluster.h"

namespace shardwright::internal {

// A NIC as one GPU sees it: its own rate or that of the way to it, whichever is less.
struct NicPort {
  std::int32_t component = 0;
  BytesPerSecond rate;
};

// The NICs at the least routing cost from `gpu`, in component order; empty without NICs.
[[nodiscard]] std::vector<NicPort> NearestNics(const NodeType& node, std::int32_t gpu);

// The same for each of `gpus`.
[[nodiscard]] std::vector<std::vector<NicPort>> NearestNicsOf(const NodeType& node,
                                                              std::span<const std::int32_t> gpus);

// Each NIC once, at the best rate that one of the GPUs near to it reaches.
[[nodiscard]] BytesPerSecond SumOfNics(std::span<const std::vector<NicPort>> nics_of_gpus);

// The rate per ring at which one ring per group, members in the order given, can run at once over
// the routes of the node: every ring gets the same rate, which fills the most loaded link.
[[nodiscard]] BytesPerSecond PcieRingRate(const NodeType& node,
                                          const std::vector<std::vector<std::int32_t>>& groups);

}  // namespace shardwright::internal
