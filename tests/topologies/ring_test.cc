#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "core/json.h"
#include "topologies/cluster.h"
#include "topologies/internal/node_graph.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// Sums and quotients of a few doubles.
constexpr double kRounding = 1e-9;

void CheckRate(BytesPerSecond actual, double expected_gb_per_s) {
  CHECK(std::abs(actual.value - expected_gb_per_s * 1e9) <= kRounding * expected_gb_per_s * 1e9);
}

RingPath Ring(const std::string& cluster, std::int64_t nodes, GroupShape shape,
              std::int64_t gpus = 0) {
  return FindRing(LoadCluster(cluster, nodes, gpus), shape);
}

// By hand: NVLink 18 x 25 GB/s, NICs 8 x 400 Gbit/s = 8 x 50 GB/s.
TEST_CASE("Ring: DGX H100") {
  RingPath path = Ring("dgx-h100", 2, {8, 1});
  CHECK(path.intra_hops == 7);
  CHECK(path.inter_hops == 0);
  CHECK(path.intra_kind == ScaleUpKind::kNvlink);
  CheckRate(path.Rate(), 450);
  path = Ring("dgx-h100", 2, {16, 1});
  CHECK(path.intra_hops == 14);
  CHECK(path.inter_hops == 1);
  CheckRate(path.intra_rate, 450);
  CheckRate(path.inter_rate, 400);
  CheckRate(path.Rate(), 400);
  path = Ring("dgx-h100", 2, {2, 8});  // eight rings share eight NICs
  CHECK(path.intra_hops == 0);
  CHECK(path.inter_hops == 1);
  CheckRate(path.Rate(), 50);
  path = Ring("dgx-h100", 4, {8, 4});  // two members per node: two NICs each
  CHECK(path.intra_hops == 4);
  CHECK(path.inter_hops == 3);
  CheckRate(path.Rate(), 100);
  path = Ring("dgx-h100", 2, {1, 1});
  CHECK(path.intra_hops == 0);
  CHECK(path.Rate() == BytesPerSecond(0));
}

TEST_CASE("Ring: NICs shared by two GPUs, or several per GPU, by hand") {
  CheckRate(Ring("p4d", 4, {32, 1}).Rate(), 4 * 12.5);
  CheckRate(Ring("p4d", 4, {4, 8}).Rate(), 12.5 / 2);
  CheckRate(Ring("p4d", 4, {16, 1}, 4).Rate(), 2 * 12.5);  // four GPUs reach two NICs
  CheckRate(Ring("p5", 2, {16, 1}).Rate(), 32 * 12.5);
  CheckRate(Ring("p5", 2, {2, 8}).Rate(), 4 * 12.5);
  CheckRate(Ring("a3-high", 2, {16, 1}).Rate(), 4 * 25.0);
}

// Meta's pods of 3,072 GPUs with 1:7 uplinks. By hand: a ring over all ranks crosses a pod border
// once, which 384 x 400 / 7 GB/s carry easily; one ring per rank gets 50 / 7 GB/s.
TEST_CASE("Ring: oversubscribed pods hurt many rings, not one") {
  RingPath path = Ring("meta-h100-roce", 2048, {16384, 1});
  CheckRate(path.Rate(), 400);
  CHECK(path.outermost_level == 2);
  path = Ring("meta-h100-roce", 1536, {4, 3072});
  CheckRate(path.Rate(), 50.0 / 7);
  path = Ring("meta-h100-roce", 384, {8, 384});  // inside one pod
  CheckRate(path.Rate(), 50);
  CHECK(path.outermost_level == 1);
}

TEST_CASE("Ring: latency of the fabric is that of the hops that pass it, by hand") {
  // 8 nodes on two leaves: 7 hops of 1 us, one of which adds the spine's 3 us.
  const Cluster cluster = LoadCluster("data/topologies/new_cluster.json");
  const RingPath path = FindRing(cluster, {32, 1});
  CHECK(path.inter_hops == 7);
  CHECK(std::abs(path.inter_latency.value - (7 * 1e-6 + 1 * 3e-6) / 7) < 1e-15);
  // A leaf's uplink: 4 nodes x 2 NICs x 25 GB/s, halved. Four rings cross it when strided by 4.
  CheckRate(FindRing(cluster, {8, 4}).Rate(), std::min(50.0 / 4, 100.0 / 4));
}

TEST_CASE("Ring: V100 meshes reach the sum of their NVLinks, by hand") {
  CheckRate(Ring("v100-4x", 1, {4, 1}).Rate(), 6 * 25);
  CheckRate(Ring("v100-4x", 1, {2, 1}).Rate(), 2 * 25);  // one pair, two links
  CheckRate(Ring("dgx-v100", 1, {8, 1}).Rate(), 6 * 25);
}

// By hand: four GPUs per socket; a ring over all crosses the 16 GB/s socket link once each way,
// four rings of two with their members on different sockets share it.
TEST_CASE("Ring: PCIe boxes") {
  RingPath path = Ring("pcie-8x4090", 1, {8, 1});
  CHECK(path.intra_kind == ScaleUpKind::kPcie);
  CheckRate(path.Rate(), 16);
  CheckRate(Ring("pcie-8x4090", 1, {4, 1}).Rate(), 31.508);
  CheckRate(Ring("pcie-8x4090", 1, {2, 4}).Rate(), 16.0 / 4);
}

TEST_CASE("Ring: GB200 racks count as nodes, by hand") {
  RingPath path = Ring("gb200-nvl72", 8, {576, 1});
  CHECK(path.intra_hops == 568);
  CHECK(path.inter_hops == 7);
  CheckRate(path.intra_rate, 900);
  CheckRate(path.inter_rate, 72 * 50);
  CheckRate(path.Rate(), 900);
  CheckRate(Ring("gb200-nvl72", 8, {8, 72}).Rate(), 50);
}

TEST_CASE("Ring: groups off the node borders get the worst placement, by hand") {
  // Groups of 12: a node in the middle has four members of each of two groups, four NICs each.
  const RingPath path = Ring("dgx-h100", 3, {12, 1});
  CHECK_FALSE(path.placement.is_aligned);
  CheckRate(path.Rate(), 4 * 50);
}

TEST_CASE("Ring: what does not tile the ranks is refused") {
  const auto error = [](GroupShape shape) -> std::string {
    try {
      (void)FindRing(LoadCluster("dgx-h100", 2), shape);
    } catch (const InputError& e) {
      return e.what();
    }
    return "no error";
  };
  CHECK(error({6, 1}) ==
        "group of 6 ranks, stride 1: got a block of 6 x 1 ranks, expected one that divides the 16 "
        "ranks of the cluster");
  CHECK(error({std::int64_t{1} << 62, 4}).find("expected one that divides") != std::string::npos);
  CHECK(error({0, 1}) != "no error");
}

// The ring rate by definition: for every way to split the group, what can cross. All splits are
// tried, switches on the better side, which is what the maximum flow finds without trying.
double SmallestCut(const NodeType& node, const std::vector<std::int32_t>& gpus) {
  std::vector<std::int32_t> switches;
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    if (node.components[i].kind == ComponentKind::kNvSwitch) {
      switches.push_back(static_cast<std::int32_t>(i));
    }
  }
  double smallest = 1e18;
  for (unsigned split = 1; split + 1 < (1U << gpus.size()); ++split) {
    for (unsigned side = 0; side < (1U << switches.size()); ++side) {
      std::vector<int> in_set(node.components.size(), -1);
      for (std::size_t i = 0; i < gpus.size(); ++i) {
        in_set[static_cast<std::size_t>(gpus[i])] = (split >> i & 1U) != 0 ? 1 : 0;
      }
      for (std::size_t i = 0; i < switches.size(); ++i) {
        in_set[static_cast<std::size_t>(switches[i])] = (side >> i & 1U) != 0 ? 1 : 0;
      }
      double cut = 0;
      for (const Link& link : node.links) {
        const int a = in_set[static_cast<std::size_t>(link.from)];
        const int b = in_set[static_cast<std::size_t>(link.to)];
        if (a >= 0 && b >= 0 && a != b) {
          cut += a == 1 ? link.forward.value : link.backward.value;
        }
      }
      smallest = std::min(smallest, cut);
    }
  }
  return smallest;
}

TEST_CASE("Ring: the NVLink rate equals the smallest cut over all splits, on random meshes") {
  std::uint64_t state = 777;
  const auto draw = [&](std::uint64_t n) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (state >> 33) % n;
  };
  for (int round = 0; round < 300; ++round) {
    CAPTURE(round);
    NodeType node;
    std::vector<std::int32_t> gpus;
    const std::size_t gpu_count = 2 + draw(4);
    const std::size_t switch_count = draw(3);
    for (std::size_t i = 0; i < gpu_count + switch_count; ++i) {
      Component component;
      component.kind = i < gpu_count ? ComponentKind::kGpu : ComponentKind::kNvSwitch;
      node.components.push_back(component);
      if (i < gpu_count && (i < 2 || draw(4) > 0)) {
        gpus.push_back(static_cast<std::int32_t>(i));
      }
    }
    for (std::size_t a = 0; a < node.components.size(); ++a) {
      for (std::size_t b = a + 1; b < node.components.size(); ++b) {
        if (draw(3) > 0) {
          Link link;
          link.from = static_cast<std::int32_t>(a);
          link.to = static_cast<std::int32_t>(b);
          link.kind = LinkKind::kNvlink;
          link.forward = BytesPerSecond(25e9 * static_cast<double>(1 + draw(4)));
          link.backward = BytesPerSecond(25e9 * static_cast<double>(1 + draw(4)));
          node.links.push_back(link);
        }
      }
    }
    CHECK(internal::NvlinkRingRate(node, gpus).value == SmallestCut(node, gpus));
  }
}

}  // namespace
}  // namespace shardwright
