#include "topologies/routing.h"

#include <cstddef>
#include <limits>
#include <map>

#include "core/error.h"
#include "core/ranges.h"
#include "topologies/internal/node_graph.h"
#include "topologies/internal/node_rates.h"

namespace shardwright {
namespace {

// Bytes that each direction of each link carries, in multiples of one flow's rate.
class LinkLoads {
 public:
  explicit LinkLoads(const NodeType& node)
      : node_(node), forward_(node.links.size()), backward_(node.links.size()) {}

  void Add(const Route& route) {
    for (const Route::Hop& hop : route.hops) {
      (hop.is_forward ? forward_ : backward_)[static_cast<std::size_t>(hop.link)] += 1;
    }
  }
  // The common rate at which the most loaded link is just full; infinity without any load.
  [[nodiscard]] double CommonRate() const {
    double rate = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < node_.links.size(); ++i) {
      if (forward_[i] > 0) {
        rate = std::min(rate, node_.links[i].forward.value / forward_[i]);
      }
      if (backward_[i] > 0) {
        rate = std::min(rate, node_.links[i].backward.value / backward_[i]);
      }
    }
    return rate;
  }

 private:
  const NodeType& node_;
  std::vector<double> forward_;
  std::vector<double> backward_;
};

// The nearest component of `kind` from the root of `tree`; the first of equals; -1: none reachable.
std::int32_t Nearest(const NodeType& node, const internal::RouteTree& tree, ComponentKind kind) {
  std::int32_t best = -1;
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    if (node.components[i].kind == kind && tree.costs[i] != internal::kUnreachable &&
        (best < 0 || tree.costs[i] < tree.costs[static_cast<std::size_t>(best)])) {
      best = static_cast<std::int32_t>(i);
    }
  }
  return best;
}

}  // namespace

namespace internal {

std::vector<NicPort> NearestNics(const NodeType& node, std::int32_t gpu) {
  const RouteTree tree = FindRoutes(node, gpu);
  const std::int32_t nearest = Nearest(node, tree, ComponentKind::kNic);
  std::vector<NicPort> nics;
  if (nearest < 0) {
    return nics;
  }
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    const Component& component = node.components[i];
    if (component.kind == ComponentKind::kNic &&
        tree.costs[i] == tree.costs[static_cast<std::size_t>(nearest)]) {
      nics.push_back(
          {static_cast<std::int32_t>(i), std::min(component.bandwidth, tree.routes[i].rate)});
    }
  }
  return nics;
}

std::vector<std::vector<NicPort>> NearestNicsOf(const NodeType& node,
                                                std::span<const std::int32_t> gpus) {
  return Mapped<std::vector<NicPort>>(
      gpus, [&](const std::int32_t gpu) { return NearestNics(node, gpu); });
}

BytesPerSecond SumOfNics(std::span<const std::vector<NicPort>> nics_of_gpus) {
  std::map<std::int32_t, BytesPerSecond> rates;
  for (const std::vector<NicPort>& nics : nics_of_gpus) {
    for (const NicPort& nic : nics) {
      rates[nic.component] = std::max(rates[nic.component], nic.rate);
    }
  }
  BytesPerSecond sum;
  for (const auto& [nic, rate] : rates) {
    sum += rate;
  }
  return sum;
}

BytesPerSecond PcieRingRate(const NodeType& node,
                            const std::vector<std::vector<std::int32_t>>& groups) {
  LinkLoads loads(node);
  for (const std::vector<std::int32_t>& members : groups) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      const std::int32_t next = members[(i + 1) % members.size()];
      if (next != members[i]) {
        const Route route = FindRoute(node, members[i], next);
        SW_CHECK(!route.hops.empty(), "a checked node is connected");
        loads.Add(route);
      }
    }
  }
  return BytesPerSecond(loads.CommonRate());
}

}  // namespace internal

Route FindRoute(const NodeType& node, std::int32_t from, std::int32_t to) {
  return internal::FindRoutes(node, from).routes[static_cast<std::size_t>(to)];
}

std::vector<std::int32_t> GpuComponents(const NodeType& node, std::int64_t count) {
  std::vector<std::int32_t> gpus;
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    if (node.components[i].kind == ComponentKind::kGpu &&
        static_cast<std::int64_t>(gpus.size()) < count) {
      gpus.push_back(static_cast<std::int32_t>(i));
    }
  }
  SW_CHECK(static_cast<std::int64_t>(gpus.size()) == count, "more GPUs used than the node has");
  return gpus;
}

HostCopyRates FindHostCopyRates(const Cluster& cluster) {
  const NodeType& node = cluster.node;
  LinkLoads to_device(node);
  LinkLoads to_host(node);
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  HostCopyRates rates;
  rates.to_device_alone = BytesPerSecond(kInfinity);
  rates.to_host_alone = BytesPerSecond(kInfinity);
  for (const std::int32_t gpu : GpuComponents(node, cluster.gpus_per_node)) {
    const internal::RouteTree tree = internal::FindRoutes(node, gpu);
    const std::int32_t memory = Nearest(node, tree, ComponentKind::kHostMemory);
    if (memory < 0) {
      return {};
    }
    const Route& out = tree.routes[static_cast<std::size_t>(memory)];
    const Route in = FindRoute(node, memory, gpu);
    to_host.Add(out);
    to_device.Add(in);
    rates.to_host_alone = std::min(rates.to_host_alone, out.rate);
    rates.to_device_alone = std::min(rates.to_device_alone, in.rate);
  }
  rates.to_device_together = BytesPerSecond(to_device.CommonRate());
  rates.to_host_together = BytesPerSecond(to_host.CommonRate());
  return rates;
}

BytesPerSecond NodeNetworkRate(const Cluster& cluster) {
  const std::vector<std::int32_t> gpus = GpuComponents(cluster.node, cluster.gpus_per_node);
  return internal::SumOfNics(internal::NearestNicsOf(cluster.node, gpus));
}

BytesPerSecond UplinkRate(const Cluster& cluster, const FabricLevel& level) {
  // The uplink exists for whole nodes, however many GPUs of each the job uses.
  std::vector<std::int32_t> gpus;
  for (std::size_t i = 0; i < cluster.node.components.size(); ++i) {
    if (cluster.node.components[i].kind == ComponentKind::kGpu) {
      gpus.push_back(static_cast<std::int32_t>(i));
    }
  }
  return internal::SumOfNics(internal::NearestNicsOf(cluster.node, gpus)) *
         (static_cast<double>(level.group_nodes) / level.oversubscription);
}

BytesPerSecond HostMemoryShare(const Cluster& cluster) {
  BytesPerSecond sum;
  for (const Link& link : cluster.node.links) {
    if (link.kind == LinkKind::kMemory) {
      sum += link.forward;
    }
  }
  return sum.value > 0 ? sum / static_cast<double>(cluster.gpus_per_node)
                       : FindHostCopyRates(cluster).to_host_together;
}

}  // namespace shardwright
