#pragma once

// Questions about a cluster: which links two components use, how fast a ring over a group of ranks
// runs, who shares what. Rates are raw link rates; Profile says what fraction software achieves.
//
// Ranks fill nodes in order: rank r is GPU r % gpus_per_node of node r / gpus_per_node.

#include <cstdint>
#include <vector>

#include "core/units.h"
#include "topologies/cluster.h"

namespace shardwright {

// A family of equal process groups that tile the ranks: member i of a group is first + i * stride.
// Blocks of size * stride consecutive ranks hold `stride` groups each. Shard groups of F ranks are
// {F, 1}; replicate groups of R members across them are {R, F}.
struct GroupShape {
  std::int64_t size = 1;
  std::int64_t stride = 1;

  bool operator==(const GroupShape&) const = default;
};

// How a family of groups lies on the nodes. Where groups do not fall on node boundaries, the
// numbers are those of the worst-placed group.
struct GroupPlacement {
  std::int64_t node_count = 1;       // nodes that one group spans
  std::int64_t ranks_per_node = 1;   // members of one group on one node, at most
  std::int64_t groups_per_node = 1;  // groups with members on one node
  std::int64_t crossing_groups = 0;  // of those, the ones with members on other nodes too
  bool is_aligned = true;            // every node holds as many members of each of its groups
};

[[nodiscard]] GroupPlacement PlaceGroup(GroupShape shape, std::int64_t gpus_per_node);

// Groups of the family with members both inside and outside of an aligned block of `ranks`
// consecutive ranks: as many rings cross the border of that block in each direction. At most
// `ranks`.
[[nodiscard]] std::int64_t CrossingGroups(GroupShape shape, std::int64_t ranks);

// Something that collectives and copies compete for, as one GPU, node or fabric group has it.
enum class ResourceKind : std::uint8_t {
  kScaleUp,   // NVLink out of one GPU
  kNodePcie,  // the PCIe fabric of a node, for rings without NVLink; capacity 1 is all of it
  kNic,       // the NICs of a node that its used GPUs reach, outgoing
  kUplink,    // out of one group of fabric level `level`
};

struct ResourceUse {
  ResourceKind kind = ResourceKind::kScaleUp;
  std::int32_t level = 0;  // of kUplink: index into Cluster::fabric
  BytesPerSecond capacity;
  // Bytes through this resource per byte of bus traffic of one member, all groups of the family
  // running in lockstep: rate * weight <= capacity.
  double weight = 1;
};

enum class ScaleUpKind : std::uint8_t { kNone, kNvlink, kPcie };

// A ring collective over the groups of one family, all groups running at the same time.
// With S bytes in the full array, all-gather and reduce-scatter take (docs/execution_model.md)
//   base + intra_hops * a_intra + inter_hops * a_inter + S (n-1)/n / min(intra_rate, inter_rate)
// and all-reduce twice the hops and bytes; latencies and efficiencies come from the profile.
struct RingPath {
  std::int64_t size = 1;
  GroupPlacement placement;
  std::int64_t intra_hops = 0;  // of the n-1 steps: those inside a node, n - node_count
  std::int64_t inter_hops = 0;  // node_count - 1
  ScaleUpKind intra_kind = ScaleUpKind::kNone;
  BytesPerSecond intra_rate;  // bus bandwidth a member can get inside the node; 0 without such hops
  BytesPerSecond inter_rate;  // the same across nodes, NICs and uplinks shared; 0 without such hops
  std::int32_t outermost_level = -1;  // highest fabric level that is crossed; -1: none
  Seconds inter_latency;          // of the switches that an inter_hop passes, averaged over them
  std::vector<ResourceUse> uses;  // for sharing with other families

  // min(intra_rate, inter_rate) of the hops there are; 0 for one member.
  [[nodiscard]] BytesPerSecond Rate() const;
};

// Throws InputError when shape.size * shape.stride does not divide the number of ranks.
[[nodiscard]] RingPath FindRing(const Cluster& cluster, GroupShape shape);

// A path through the node graph. GPUs, NICs and memories are ends only, never passed through.
struct Route {
  struct Hop {
    std::int32_t link = 0;   // index into NodeType::links
    bool is_forward = true;  // from -> to
  };
  std::vector<Hop> hops;
  BytesPerSecond rate;  // of the slowest hop
  Seconds latency;      // sum
};

// The route between two components (indexes into `node.components`) that avoids CPU links first,
// then PCIe, then hops. Empty hops and rate 0 when there is none.
[[nodiscard]] Route FindRoute(const NodeType& node, std::int32_t from, std::int32_t to);

// Indexes into node.components of its first `count` GPUs.
[[nodiscard]] std::vector<std::int32_t> GpuComponents(const NodeType& node, std::int64_t count);

// Copies between one GPU and the nearest host memory, per direction.
struct HostCopyRates {
  BytesPerSecond to_device_alone;
  BytesPerSecond to_host_alone;
  // The slowest GPU while all used GPUs of the node copy at the same time in that direction.
  BytesPerSecond to_device_together;
  BytesPerSecond to_host_together;
};
[[nodiscard]] HostCopyRates FindHostCopyRates(const Cluster& cluster);

// Host memory bandwidth of the node divided by the GPUs in use; without memory links in the node
// graph, what copies of all of them reach.
[[nodiscard]] BytesPerSecond HostMemoryShare(const Cluster& cluster);

// Rate of one node towards the fabric through the NICs next to its used GPUs; 0 without NICs.
[[nodiscard]] BytesPerSecond NodeNetworkRate(const Cluster& cluster);

// Capacity per direction out of one group of nodes of `level`: the nodes' NIC rate over its
// oversubscription. Requires level.group_nodes > 0.
[[nodiscard]] BytesPerSecond UplinkRate(const Cluster& cluster, const FabricLevel& level);

}  // namespace shardwright
