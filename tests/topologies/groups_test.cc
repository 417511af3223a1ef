#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include "topologies/routing.h"

namespace shardwright {
namespace {

// Everything about groups by listing them: the oracle for the counting formulas.
struct Counted {
  std::int64_t node_count = 0;
  std::int64_t ranks_per_node = 0;
  std::int64_t groups_per_node = 0;
  std::int64_t crossing_groups = 0;
  bool is_even = true;  // groups have one member count on all their nodes, nodes one group count
};

Counted CountByListing(GroupShape shape, std::int64_t g) {
  const std::int64_t block = shape.size * shape.stride;
  const std::int64_t total = std::lcm(block, g);
  // node -> group -> members
  std::map<std::int64_t, std::map<std::int64_t, std::int64_t>> nodes;
  std::map<std::int64_t, std::set<std::int64_t>> nodes_of_group;
  for (std::int64_t rank = 0; rank < total; ++rank) {
    const std::int64_t group = rank / block * block + rank % block % shape.stride;
    ++nodes[rank / g][group];
    nodes_of_group[group].insert(rank / g);
  }
  Counted counted;
  for (const auto& [group, own] : nodes_of_group) {
    counted.node_count = std::max(counted.node_count, static_cast<std::int64_t>(own.size()));
  }
  std::set<std::int64_t> member_counts;
  for (const auto& [node, groups] : nodes) {
    std::int64_t crossing = 0;
    for (const auto& [group, members] : groups) {
      counted.ranks_per_node = std::max(counted.ranks_per_node, members);
      member_counts.insert(members);
      crossing += members < shape.size ? 1 : 0;
    }
    counted.groups_per_node =
        std::max(counted.groups_per_node, static_cast<std::int64_t>(groups.size()));
    counted.crossing_groups = std::max(counted.crossing_groups, crossing);
  }
  counted.is_even = member_counts.size() == 1;
  return counted;
}

TEST_CASE("Groups: counting equals listing for all small shapes") {
  for (std::int64_t g = 1; g <= 9; ++g) {
    for (std::int64_t size = 1; size <= 14; ++size) {
      for (std::int64_t stride = 1; stride <= 20; ++stride) {
        CAPTURE(g);
        CAPTURE(size);
        CAPTURE(stride);
        const GroupShape shape{size, stride};
        const Counted expected = CountByListing(shape, g);
        const GroupPlacement placement = PlaceGroup(shape, g);
        CHECK(placement.node_count == expected.node_count);
        CHECK(placement.groups_per_node == expected.groups_per_node);
        CHECK(placement.crossing_groups == expected.crossing_groups);
        CHECK(CrossingGroups(shape, g) == expected.crossing_groups);
        // "At most": exact where groups are even, an upper bound of one more elsewhere.
        CHECK(placement.ranks_per_node >= expected.ranks_per_node);
        CHECK(placement.ranks_per_node <= expected.ranks_per_node + 1);
        if (placement.is_aligned) {
          CHECK(expected.is_even);
          CHECK(placement.ranks_per_node == expected.ranks_per_node);
        }
      }
    }
  }
}

TEST_CASE("Groups: the usual cases, by hand") {
  // 16 shards on two nodes of 8.
  GroupPlacement p = PlaceGroup({16, 1}, 8);
  CHECK(p.node_count == 2);
  CHECK(p.ranks_per_node == 8);
  CHECK(p.groups_per_node == 1);
  CHECK(p.crossing_groups == 1);
  CHECK(p.is_aligned);
  // Two shard groups of four in a node: nothing leaves it.
  p = PlaceGroup({4, 1}, 8);
  CHECK(p.node_count == 1);
  CHECK(p.groups_per_node == 2);
  CHECK(p.crossing_groups == 0);
  // Replicas of groups of 8: one ring per GPU crosses.
  p = PlaceGroup({4, 8}, 8);
  CHECK(p.node_count == 4);
  CHECK(p.ranks_per_node == 1);
  CHECK(p.groups_per_node == 8);
  CHECK(p.crossing_groups == 8);
  // Groups of 12 on nodes of 8 straddle.
  p = PlaceGroup({12, 1}, 8);
  CHECK(p.node_count == 2);
  CHECK(p.crossing_groups == 2);
  CHECK_FALSE(p.is_aligned);
}

TEST_CASE("Groups: 100,000 ranks and huge blocks take no time per rank") {
  // Blocks of 3072-rank pods; by hand: one ring per rank of a pod leaves it, or one in all.
  CHECK(CrossingGroups({32, 3072}, 3072) == 3072);
  CHECK(CrossingGroups({98304, 1}, 3072) == 1);
  CHECK(CrossingGroups({3072, 1}, 3072) == 0);
  CHECK(CrossingGroups({12288, 8}, 3072) == 8);
  CHECK(PlaceGroup({std::int64_t{1} << 40, 1}, 8).node_count == std::int64_t{1} << 37);
}

}  // namespace
}  // namespace shardwright
