// Rings over families of groups. Declared in topologies/routing.h.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "topologies/internal/group_windows.h"
#include "topologies/internal/node_graph.h"
#include "topologies/internal/node_rates.h"
#include "topologies/mesh.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

using Components = std::vector<std::int32_t>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The groups with members on one node: their GPUs there, in rank order.
struct LocalGroup {
  std::int64_t first_rank = 0;  // of the group, so that groups can be told apart
  Components gpus;
  bool is_crossing = false;
};

std::vector<LocalGroup> GroupsOnNode(GroupShape shape, std::int64_t node, const Components& gpus) {
  std::vector<LocalGroup> groups;
  for (std::size_t j = 0; j < gpus.size(); ++j) {
    const std::int64_t rank =
        node * static_cast<std::int64_t>(gpus.size()) + static_cast<std::int64_t>(j);
    const std::int64_t first = PlaceInGroup(shape, Rank(static_cast<std::size_t>(rank))).base;
    auto group = FindIn(groups, first, &LocalGroup::first_rank);
    if (group == groups.end()) {
      groups.push_back({first, {}, false});
      group = groups.end() - 1;
    }
    group->gpus.push_back(gpus[j]);
  }
  for (LocalGroup& group : groups) {
    group.is_crossing = static_cast<std::int64_t>(group.gpus.size()) < shape.size;
  }
  return groups;
}

// Rates inside and out of nodes of a cluster, with what is computed once per set of GPUs kept.
class NodeRates {
 public:
  NodeRates(const NodeType& node, const Components& gpus) : node_(node), gpus_(gpus) {}

  struct Intra {
    ScaleUpKind kind = ScaleUpKind::kNone;
    BytesPerSecond rate{kInfinity};
  };
  // Of the slowest of `groups` with several members on the node.
  Intra IntraRate(const std::vector<LocalGroup>& groups) {
    Intra slowest;
    std::vector<Components> without_nvlink;
    for (const LocalGroup& group : groups) {
      if (group.gpus.size() < 2) {
        continue;
      }
      const BytesPerSecond rate = NvlinkRate(group.gpus);
      if (rate.value <= 0) {
        without_nvlink.push_back(group.gpus);
      } else if (slowest.kind == ScaleUpKind::kNone || rate < slowest.rate) {
        slowest = {ScaleUpKind::kNvlink, rate};
      }
    }
    if (!without_nvlink.empty()) {
      const BytesPerSecond rate = internal::PcieRingRate(node_, without_nvlink);
      if (slowest.kind == ScaleUpKind::kNone || rate < slowest.rate) {
        slowest = {ScaleUpKind::kPcie, rate};
      }
    }
    return slowest;
  }

  // The slowest crossing group's rate out of the node. A group runs one channel per NIC next to its
  // members, all at one rate; a NIC is shared evenly by the groups that use it.
  BytesPerSecond InterRate(const std::vector<LocalGroup>& groups) {
    std::vector<std::map<std::int32_t, double>> nics_of;  // per crossing group: NIC -> rate
    std::map<std::int32_t, double> sharers;
    for (const LocalGroup& group : groups) {
      if (!group.is_crossing) {
        continue;
      }
      std::map<std::int32_t, double>& own = nics_of.emplace_back();
      for (const std::int32_t gpu : group.gpus) {
        for (const internal::NicPort& nic : NicsOf(gpu)) {
          own[nic.component] = std::max(own[nic.component], nic.rate.value);
        }
      }
      for (const auto& [nic, rate] : own) {
        sharers[nic] += 1;
      }
    }
    double slowest = kInfinity;
    for (const auto& own : nics_of) {
      double channel = kInfinity;
      for (const auto& [nic, rate] : own) {
        channel = std::min(channel, rate / sharers[nic]);
      }
      slowest = std::min(slowest, own.empty() ? 0.0 : channel * static_cast<double>(own.size()));
    }
    return BytesPerSecond(slowest);
  }

  // Of the node, through the NICs near to its used GPUs.
  BytesPerSecond NetworkRate() { return internal::SumOfNics(Nics()); }

 private:
  BytesPerSecond NvlinkRate(const Components& gpus) {
    const auto [slot, is_new] = nvlink_rates_.try_emplace(gpus);
    if (is_new) {
      slot->second = internal::NvlinkRingRate(node_, gpus);
    }
    return slot->second;
  }
  const std::vector<std::vector<internal::NicPort>>& Nics() {
    if (nics_.empty()) {
      nics_ = internal::NearestNicsOf(node_, gpus_);
    }
    return nics_;
  }
  const std::vector<internal::NicPort>& NicsOf(std::int32_t gpu) {
    const auto at = std::lower_bound(gpus_.begin(), gpus_.end(), gpu) - gpus_.begin();
    return Nics()[static_cast<std::size_t>(at)];
  }

  const NodeType& node_;
  const Components& gpus_;  // ascending
  std::map<Components, BytesPerSecond> nvlink_rates_;
  std::vector<std::vector<internal::NicPort>> nics_;  // per GPU of gpus_
};

// Sum of the NVLinks out of the GPU with the least of them.
BytesPerSecond NvlinkOut(const NodeType& node, const Components& gpus) {
  std::vector<BytesPerSecond> out(node.components.size());
  for (const Link& link : node.links) {
    if (link.kind == LinkKind::kNvlink) {
      out[static_cast<std::size_t>(link.from)] += link.forward;
      out[static_cast<std::size_t>(link.to)] += link.backward;
    }
  }
  BytesPerSecond least(kInfinity);
  for (const std::int32_t gpu : gpus) {
    least = std::min(least, out[static_cast<std::size_t>(gpu)]);
  }
  return least;
}

// Uplinks of the fabric that the rings cross: the shared rate, the latency and the resources.
void AddFabric(const Cluster& cluster, GroupShape shape, RingPath& path) {
  std::int64_t hops = path.inter_hops;  // that reach the current level
  for (std::size_t i = 0; i < cluster.fabric.size() && hops > 0; ++i) {
    const FabricLevel& level = cluster.fabric[i];
    path.outermost_level = static_cast<std::int32_t>(i);
    path.inter_latency +=
        level.latency * (static_cast<double>(hops) / static_cast<double>(path.inter_hops));
    if (level.group_nodes == 0 || level.group_nodes >= cluster.node_count) {
      return;
    }
    const std::int64_t ranks = level.group_nodes * cluster.gpus_per_node;
    const std::int64_t crossing = CrossingGroups(shape, ranks);
    hops = internal::SpannedWindows(shape, ranks) - 1;
    if (crossing == 0) {
      return;
    }
    const BytesPerSecond uplink = UplinkRate(cluster, level);
    path.uses.push_back({ResourceKind::kUplink, static_cast<std::int32_t>(i), uplink,
                         static_cast<double>(crossing)});
    path.inter_rate = std::min(path.inter_rate, uplink / static_cast<double>(crossing));
  }
}

}  // namespace

BytesPerSecond RingPath::Rate() const {
  if (intra_hops == 0 && inter_hops == 0) {
    return BytesPerSecond(0);
  }
  if (intra_hops == 0) {
    return inter_rate;
  }
  return inter_hops == 0 ? intra_rate : std::min(intra_rate, inter_rate);
}

RingPath FindRing(const Cluster& cluster, GroupShape shape) {
  const std::int64_t total = cluster.RankCount();
  if (!Tiles(shape, total)) {
    throw InputError(
        "group of " + std::to_string(shape.size) + " ranks, stride " + std::to_string(shape.stride),
        "a block of " + std::to_string(shape.size) + " x " + std::to_string(shape.stride) +
            " ranks",
        "one that divides the " + std::to_string(total) + " ranks of the cluster");
  }
  RingPath path;
  path.size = shape.size;
  path.placement = PlaceGroup(shape, cluster.gpus_per_node);
  if (shape.size == 1) {
    return path;
  }
  const Components gpus = GpuComponents(cluster.node, cluster.gpus_per_node);
  path.inter_hops = path.placement.node_count - 1;
  path.intra_hops = shape.size - path.placement.node_count;

  NodeRates rates(cluster.node, gpus);
  NodeRates::Intra intra;
  BytesPerSecond inter(kInfinity);
  for (const std::int64_t node : internal::RepresentativeWindows(shape, cluster.gpus_per_node)) {
    const std::vector<LocalGroup> groups = GroupsOnNode(shape, node, gpus);
    const NodeRates::Intra here = rates.IntraRate(groups);
    if (here.kind != ScaleUpKind::kNone && here.rate < intra.rate) {
      intra = here;
    }
    inter = std::min(inter, rates.InterRate(groups));
  }
  path.intra_kind = intra.kind;
  if (intra.kind == ScaleUpKind::kNvlink) {
    path.intra_rate = intra.rate;
    path.uses.push_back({ResourceKind::kScaleUp, 0, NvlinkOut(cluster.node, gpus), 1});
  } else if (intra.kind == ScaleUpKind::kPcie) {
    path.intra_rate = intra.rate;
    path.uses.push_back({ResourceKind::kNodePcie, 0, BytesPerSecond(1), 1 / intra.rate.value});
  }
  if (path.inter_hops > 0) {
    path.inter_rate = inter;
    const BytesPerSecond network = rates.NetworkRate();
    if (network.value <= 0) {
      throw InputError("cluster " + cluster.name, "no NIC in its nodes",
                       "one, since " + std::to_string(cluster.node_count) + " nodes are used");
    }
    path.uses.push_back({ResourceKind::kNic, 0, network, network.value / inter.value});
    AddFabric(cluster, shape, path);
  }
  return path;
}

}  // namespace shardwright
