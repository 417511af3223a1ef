#include "topologies/internal/node_builder.h"

#include <cstddef>

#include "core/ranges.h"
#include "core/text.h"
#include "topologies/internal/node_graph.h"

namespace shardwright::internal {
namespace {

// A rack-scale node has a few hundred components; this stops typing errors and hostile files.
constexpr std::int64_t kMostComponents = 4096;
constexpr std::size_t kMostLinks = 65536;

}  // namespace

void NodeBuilder::AddGroup(const Component& component, std::int64_t count, const Path& where) {
  const auto first = static_cast<std::int32_t>(node_.components.size());
  if (count > kMostComponents - first) {
    throw InputError(where.Field("count").str(), std::to_string(count),
                     "at most " + std::to_string(kMostComponents) + " components in a node");
  }
  for (std::int64_t i = 0; i < count; ++i) {
    Component copy = component;
    if (count > 1) {
      copy.name += std::to_string(i);
    }
    const auto is_same = [&](const Component& other) { return other.name == copy.name; };
    if (AnyOf(node_.components, is_same)) {
      throw InputError(where.Field("name").str(), "a second component " + Quoted(copy.name),
                       "each name once");
    }
    node_.components.push_back(copy);
    if (copy.kind == ComponentKind::kHostMemory) {
      node_.host_memory += copy.capacity;
    }
  }
  groups_.push_back({component.name, first, static_cast<std::int32_t>(count)});
}

NodeBuilder::Group NodeBuilder::FindGroup(const std::string& name, const Path& where) const {
  std::vector<std::string> names;
  for (const Group& group : groups_) {
    if (group.name == name) {
      return group;
    }
    names.push_back(group.name);
  }
  for (std::size_t i = 0; i < node_.components.size(); ++i) {
    if (node_.components[i].name == name) {
      return {name, static_cast<std::int32_t>(i), 1};
    }
  }
  throw InputError(where.str(), Quoted(name), "a component of this node", DidYouMean(name, names));
}

void NodeBuilder::AddLink(std::int32_t from, std::int32_t to, Link link, const Path& where) {
  const auto name = [&](std::int32_t i) {
    return Quoted(node_.components[static_cast<std::size_t>(i)].name);
  };
  if (from == to) {
    throw InputError(where.str(), "a link from " + name(from) + " to itself",
                     "two different components");
  }
  if (!linked_.emplace(link.kind, std::min(from, to), std::max(from, to)).second) {
    throw InputError(where.str(), "a second link between " + name(from) + " and " + name(to),
                     "one link with the sum of the bandwidths");
  }
  if (node_.links.size() == kMostLinks) {
    throw InputError(where.str(), "one link more", "at most " + std::to_string(kMostLinks));
  }
  link.from = from;
  link.to = to;
  node_.links.push_back(link);
}

void NodeBuilder::Connect(const std::string& from, const std::string& to, LinkPattern pattern,
                          const Link& link, const Path& where) {
  const Group a = FindGroup(from, where.Field("from"));
  const Group b = FindGroup(to, where.Field("to"));
  if (pattern == LinkPattern::kAll) {
    const bool is_same_group = a.first == b.first && a.count == b.count;
    for (std::int32_t i = 0; i < a.count; ++i) {
      for (std::int32_t j = is_same_group ? i + 1 : 0; j < b.count; ++j) {
        AddLink(a.first + i, b.first + j, link, where);
      }
    }
    return;
  }
  const std::int32_t larger = std::max(a.count, b.count);
  const std::int32_t smaller = std::min(a.count, b.count);
  if (larger % smaller != 0) {
    throw InputError(where.str(),
                     std::to_string(a.count) + " components linked to " + std::to_string(b.count),
                     "counts that divide, or the pattern \"all\"");
  }
  const std::int32_t share = larger / smaller;
  for (std::int32_t i = 0; i < larger; ++i) {
    const bool is_a_larger = a.count >= b.count;
    AddLink(a.first + (is_a_larger ? i : i / share), b.first + (is_a_larger ? i / share : i), link,
            where);
  }
}

NodeType NodeBuilder::Finish(const Path& where) {
  const auto name = [&](std::int32_t i) {
    return Quoted(node_.components[static_cast<std::size_t>(i)].name);
  };
  const auto is_gpu = [](const Component& c) { return c.kind == ComponentKind::kGpu; };
  if (NoneOf(node_.components, is_gpu)) {
    throw InputError(where.Field("components").str(), "no GPU", "at least one");
  }
  const std::vector<std::int32_t> missing = Unconnected(node_);
  if (!missing.empty()) {
    throw InputError(where.Field("links").str(), name(missing[0]) + " not connected to " + name(0),
                     "links that join all components");
  }
  const std::int32_t cycle = FirstPcieCycle(node_);
  if (cycle >= 0) {
    const Link& link = node_.links[static_cast<std::size_t>(cycle)];
    throw InputError(
        where.Field("links").str(),
        "a cycle of PCIe links closed between " + name(link.from) + " and " + name(link.to),
        "a tree; links between sockets have the type \"cpu\"");
  }
  node_.pinned_limit = node_.host_memory;
  return std::move(node_);
}

}  // namespace shardwright::internal
