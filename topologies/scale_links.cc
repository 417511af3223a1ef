#include "topologies/scale_links.h"

#include <cstddef>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

constexpr std::string_view kNvlinkLevel = "nvlink";
constexpr std::string_view kPcieLevel = "pcie";
constexpr std::string_view kNetworkLevel = "network";

bool HasLink(const Cluster& cluster, LinkKind kind) {
  return IsIn(cluster.node.links, kind, &Link::kind);
}

bool IsNic(const Cluster& cluster, std::int32_t component) {
  return cluster.node.components[static_cast<std::size_t>(component)].kind == ComponentKind::kNic;
}

void Scale(Link& link, double factor) {
  link.forward = link.forward * factor;
  link.backward = link.backward * factor;
}

void ScaleKind(Cluster& cluster, LinkKind kind, double factor) {
  for (Link& link : cluster.node.links) {
    if (link.kind == kind) {
      Scale(link, factor);
    }
  }
}

void ScaleNetwork(Cluster& cluster, double factor) {
  for (Component& component : cluster.node.components) {
    component.bandwidth = component.bandwidth * factor;  // 0 but for NICs
  }
  for (Link& link : cluster.node.links) {
    if (IsNic(cluster, link.from) || IsNic(cluster, link.to)) {
      Scale(link, factor);
    }
  }
}

}  // namespace

std::vector<std::string> LinkLevels(const Cluster& cluster) {
  std::vector<std::string> levels;
  if (HasLink(cluster, LinkKind::kNvlink)) {
    levels.emplace_back(kNvlinkLevel);
  }
  if (HasLink(cluster, LinkKind::kPcie)) {
    levels.emplace_back(kPcieLevel);
  }
  const auto& components = cluster.node.components;
  if (IsIn(components, ComponentKind::kNic, &Component::kind)) {
    levels.emplace_back(kNetworkLevel);
  }
  for (const FabricLevel& level : cluster.fabric) {
    if (level.group_nodes > 0) {
      levels.push_back(level.name);
    }
  }
  return levels;
}

void ScaleLinks(Cluster& cluster, std::string_view level, double factor, std::string_view where) {
  SW_CHECK(factor > 0, "links need a positive factor");
  const std::vector<std::string> levels = LinkLevels(cluster);
  if (!IsIn(levels, level)) {
    std::string expected = "a level of cluster " + cluster.name + ":";
    for (std::size_t i = 0; i < levels.size(); ++i) {
      expected += (i == 0 ? " " : ", ") + levels[i];
    }
    throw InputError(where, "\"" + std::string(level) + "\"",
                     levels.empty() ? "a cluster with links" : expected, DidYouMean(level, levels));
  }
  if (level == kNvlinkLevel) {
    ScaleKind(cluster, LinkKind::kNvlink, factor);
  } else if (level == kPcieLevel) {
    ScaleKind(cluster, LinkKind::kPcie, factor);
  } else if (level == kNetworkLevel) {
    ScaleNetwork(cluster, factor);
  } else {
    for (FabricLevel& fabric : cluster.fabric) {
      if (fabric.group_nodes > 0 && fabric.name == level) {
        fabric.oversubscription /= factor;
      }
    }
  }
}

}  // namespace shardwright
