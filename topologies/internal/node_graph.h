#pragma once

// Graph questions about one node; the only place that knows Boost.Graph.

#include <cstdint>
#include <span>
#include <vector>

#include "core/units.h"
#include "topologies/cluster.h"
#include "topologies/routing.h"

namespace shardwright::internal {

// Routes from one component to all others, and how costly each is: a larger cost is a worse
// neighbourhood, equal costs are equally near. Unreachable components have cost kUnreachable.
struct RouteTree {
  std::vector<std::int64_t> costs;
  std::vector<Route> routes;
};
inline constexpr std::int64_t kUnreachable = -1;
[[nodiscard]] RouteTree FindRoutes(const NodeType& node, std::int32_t from);

// The components that no sequence of links joins to component 0, ascending.
[[nodiscard]] std::vector<std::int32_t> Unconnected(const NodeType& node);

// The first PCIe link (index) that closes a cycle of PCIe links, or -1: PCIe is a tree by design.
[[nodiscard]] std::int32_t FirstPcieCycle(const NodeType& node);

// The rate at which rings over `gpus` (components) can run on NVLink alone, all directions of all
// links used: the smallest cut that separates two of them, in the graph of `gpus`, switches and
// NVLinks. 0 when NVLink does not join them. One ring direction per channel, as NCCL builds them,
// reaches this on switched nodes and on the full and cube meshes that exist.
[[nodiscard]] BytesPerSecond NvlinkRingRate(const NodeType& node,
                                            std::span<const std::int32_t> gpus);

}  // namespace shardwright::internal
