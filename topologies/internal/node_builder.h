#pragma once

// Builds a NodeType from groups of equal components and the links between groups.

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "topologies/cluster.h"

namespace shardwright::internal {

enum class LinkPattern : std::uint8_t {
  // Member i of the larger group with its share of the smaller: 8 GPUs on 4 switches give two each.
  kSpread,
  // Every member with every member of the other group, or all pairs of one group.
  kAll,
};

class NodeBuilder {
 public:
  // Adds `count` copies of `component`; they are named name0, name1, ... unless count is 1. Throws
  // InputError at `where` for a name twice or too many components.
  void AddGroup(const Component& component, std::int64_t count, const Path& where);
  // Links two groups or single components by name; `link` gives everything but the ends.
  void Connect(const std::string& from, const std::string& to, LinkPattern pattern,
               const Link& link, const Path& where);
  // Checks the whole: at least one GPU, everything connected, PCIe without cycles. `where` is the
  // node's place in the input.
  [[nodiscard]] NodeType Finish(const Path& where);

 private:
  struct Group {
    std::string name;
    std::int32_t first = 0;
    std::int32_t count = 0;
  };
  [[nodiscard]] Group FindGroup(const std::string& name, const Path& where) const;
  void AddLink(std::int32_t from, std::int32_t to, Link link, const Path& where);

  NodeType node_;
  std::vector<Group> groups_;
  std::set<std::tuple<LinkKind, std::int32_t, std::int32_t>> linked_;  // smaller end first
};

}  // namespace shardwright::internal
