#include "topologies/internal/node_graph.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/connected_components.hpp>
#include <boost/graph/dijkstra_shortest_paths.hpp>
#include <boost/graph/edmonds_karp_max_flow.hpp>
#include <boost/pending/disjoint_sets.hpp>

#include "core/error.h"

namespace shardwright::internal {
namespace {

// A hop over a link of this kind. Crossing sockets is worse than any detour below one socket, and
// PCIe worse than any NVLink path; nodes have fewer than a thousand links.
std::int64_t HopCost(LinkKind kind) {
  return kind == LinkKind::kPcie ? 1000 : kind == LinkKind::kCpu ? 1000000 : 1;
}

// GPUs, NICs and memories do not forward traffic.
bool Forwards(ComponentKind kind) {
  using enum ComponentKind;
  return kind != kGpu && kind != kHostMemory && kind != kNic;
}

struct ArcData {
  std::int64_t cost = 0;
  std::int32_t link = 0;
  bool is_forward = true;
};
using RouteGraph =
    boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, boost::no_property, ArcData>;

RouteGraph BuildRouteGraph(const NodeType& node, std::int32_t from) {
  RouteGraph graph(node.components.size());
  const auto may_leave = [&](std::int32_t component) {
    return component == from || Forwards(node.components[static_cast<std::size_t>(component)].kind);
  };
  for (std::size_t i = 0; i < node.links.size(); ++i) {
    const Link& link = node.links[i];
    const auto index = static_cast<std::int32_t>(i);
    const auto a = static_cast<std::size_t>(link.from);
    const auto b = static_cast<std::size_t>(link.to);
    if (may_leave(link.from) && link.forward.value > 0) {
      boost::add_edge(a, b, ArcData{HopCost(link.kind), index, true}, graph);
    }
    if (may_leave(link.to) && link.backward.value > 0) {
      boost::add_edge(b, a, ArcData{HopCost(link.kind), index, false}, graph);
    }
  }
  return graph;
}

// The cheapest arc a -> b; the first of equals.
ArcData CheapestArc(const RouteGraph& graph, std::size_t a, std::size_t b) {
  ArcData best{std::numeric_limits<std::int64_t>::max(), -1, true};
  const auto [begin, end] = boost::out_edges(a, graph);
  for (auto it = begin; it != end; ++it) {
    if (boost::target(*it, graph) == b && graph[*it].cost < best.cost) {
      best = graph[*it];
    }
  }
  SW_CHECK(best.link >= 0, "a predecessor is a neighbour");
  return best;
}

using FlowTraits = boost::adjacency_list_traits<boost::vecS, boost::vecS, boost::directedS>;
using FlowGraph = boost::adjacency_list<
    boost::vecS, boost::vecS, boost::directedS, boost::no_property,
    boost::property<
        boost::edge_capacity_t, std::int64_t,
        boost::property<boost::edge_residual_capacity_t, std::int64_t,
                        boost::property<boost::edge_reverse_t, FlowTraits::edge_descriptor>>>>;

// Boost wants every arc to have a reverse of capacity 0 of its own.
void AddFlowArc(FlowGraph& graph, std::size_t a, std::size_t b, std::int64_t capacity) {
  const auto there = boost::add_edge(a, b, graph).first;
  const auto back = boost::add_edge(b, a, graph).first;
  boost::put(boost::edge_capacity, graph, there, capacity);
  boost::put(boost::edge_capacity, graph, back, 0);
  boost::put(boost::edge_reverse, graph, there, back);
  boost::put(boost::edge_reverse, graph, back, there);
}

// Augmenting paths suffice: the graphs are small, and push-relabel in Boost 1.74 starts with the
// largest integer at the source, which overflows in its own checks.
std::int64_t MaxFlow(FlowGraph& graph, std::size_t from, std::size_t to) {
  const auto index = boost::get(boost::vertex_index, graph);
  std::vector<boost::default_color_type> colors(boost::num_vertices(graph));
  std::vector<FlowGraph::edge_descriptor> predecessors(boost::num_vertices(graph));
  return boost::edmonds_karp_max_flow(
      graph, from, to,
      boost::color_map(boost::make_iterator_property_map(colors.begin(), index))
          .predecessor_map(boost::make_iterator_property_map(predecessors.begin(), index)));
}

}  // namespace

RouteTree FindRoutes(const NodeType& node, std::int32_t from) {
  const RouteGraph graph = BuildRouteGraph(node, from);
  const std::size_t count = node.components.size();
  std::vector<std::size_t> predecessors(count);
  std::vector<std::int64_t> costs(count);
  const auto source = static_cast<std::size_t>(from);
  boost::dijkstra_shortest_paths(
      graph, source,
      boost::weight_map(boost::get(&ArcData::cost, graph))
          .predecessor_map(boost::make_iterator_property_map(
              predecessors.begin(), boost::get(boost::vertex_index, graph)))
          .distance_map(boost::make_iterator_property_map(costs.begin(),
                                                          boost::get(boost::vertex_index, graph))));
  RouteTree tree;
  tree.costs.assign(count, kUnreachable);
  tree.routes.resize(count);
  tree.costs[source] = 0;
  for (std::size_t to = 0; to < count; ++to) {
    if (to == source || predecessors[to] == to) {
      continue;
    }
    Route& route = tree.routes[to];
    tree.costs[to] = costs[to];
    route.rate = BytesPerSecond(std::numeric_limits<double>::infinity());
    for (std::size_t at = to; at != source; at = predecessors[at]) {
      const ArcData arc = CheapestArc(graph, predecessors[at], at);
      const Link& link = node.links[static_cast<std::size_t>(arc.link)];
      route.hops.push_back({arc.link, arc.is_forward});
      route.rate = std::min(route.rate, arc.is_forward ? link.forward : link.backward);
      route.latency += link.latency;
    }
    std::reverse(route.hops.begin(), route.hops.end());
  }
  return tree;
}

std::vector<std::int32_t> Unconnected(const NodeType& node) {
  boost::adjacency_list<boost::vecS, boost::vecS, boost::undirectedS> graph(node.components.size());
  for (const Link& link : node.links) {
    boost::add_edge(static_cast<std::size_t>(link.from), static_cast<std::size_t>(link.to), graph);
  }
  std::vector<std::size_t> component(node.components.size());
  boost::connected_components(graph, component.data());
  std::vector<std::int32_t> missing;
  for (std::size_t i = 0; i < component.size(); ++i) {
    if (component[i] != component[0]) {
      missing.push_back(static_cast<std::int32_t>(i));
    }
  }
  return missing;
}

std::int32_t FirstPcieCycle(const NodeType& node) {
  std::vector<std::size_t> ranks(node.components.size());
  std::vector<std::size_t> parents(node.components.size());
  boost::disjoint_sets<std::size_t*, std::size_t*> sets(ranks.data(), parents.data());
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    sets.make_set(i);
  }
  for (std::size_t i = 0; i < node.links.size(); ++i) {
    const Link& link = node.links[i];
    if (link.kind != LinkKind::kPcie) {
      continue;
    }
    const std::size_t a = sets.find_set(static_cast<std::size_t>(link.from));
    const std::size_t b = sets.find_set(static_cast<std::size_t>(link.to));
    if (a == b) {
      return static_cast<std::int32_t>(i);
    }
    sets.link(a, b);
  }
  return -1;
}

BytesPerSecond NvlinkRingRate(const NodeType& node, std::span<const std::int32_t> gpus) {
  if (gpus.size() < 2) {
    return BytesPerSecond(0);
  }
  std::vector<bool> takes_part(node.components.size(), false);
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    takes_part[i] = node.components[i].kind == ComponentKind::kNvSwitch;
  }
  for (const std::int32_t gpu : gpus) {
    takes_part[static_cast<std::size_t>(gpu)] = true;
  }
  FlowGraph graph(node.components.size());
  for (const Link& link : node.links) {
    const auto a = static_cast<std::size_t>(link.from);
    const auto b = static_cast<std::size_t>(link.to);
    if (link.kind == LinkKind::kNvlink && takes_part[a] && takes_part[b]) {
      AddFlowArc(graph, a, b, std::llround(link.forward.value));
      AddFlowArc(graph, b, a, std::llround(link.backward.value));
    }
  }
  // A cut that separates any two members separates the first from some other, in one direction.
  const auto first = static_cast<std::size_t>(gpus[0]);
  std::int64_t smallest = std::numeric_limits<std::int64_t>::max();
  for (std::size_t i = 1; i < gpus.size(); ++i) {
    const auto other = static_cast<std::size_t>(gpus[i]);
    smallest = std::min(smallest, MaxFlow(graph, first, other));
    smallest = std::min(smallest, MaxFlow(graph, other, first));
  }
  return BytesPerSecond(static_cast<double>(smallest));
}

}  // namespace shardwright::internal
