#include "topologies/routing.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "topologies/cluster.h"

namespace shardwright {
namespace {

constexpr double kRounding = 1e-9;

void CheckRate(BytesPerSecond actual, double expected_gb_per_s) {
  CHECK(std::abs(actual.value - expected_gb_per_s * 1e9) <= kRounding * expected_gb_per_s * 1e9);
}

std::int32_t Find(const NodeType& node, const std::string& name) {
  for (std::size_t i = 0; i < node.components.size(); ++i) {
    if (node.components[i].name == name) {
      return static_cast<std::int32_t>(i);
    }
  }
  return -1;
}

// The names of the components that a route passes, ends included.
std::string Way(const NodeType& node, const std::string& from, const std::string& to) {
  const Route route = FindRoute(node, Find(node, from), Find(node, to));
  std::string text = from;
  std::int32_t at = Find(node, from);
  for (const Route::Hop& hop : route.hops) {
    const Link& link = node.links[static_cast<std::size_t>(hop.link)];
    CHECK((hop.is_forward ? link.from : link.to) == at);
    at = hop.is_forward ? link.to : link.from;
    text += " " + node.components[static_cast<std::size_t>(at)].name;
  }
  return text;
}

TEST_CASE("Routing: NVLink before PCIe before sockets, by hand from the block diagrams") {
  const NodeType a100 = LoadCluster("dgx-a100").node;
  CHECK(Way(a100, "gpu0", "gpu7") == "gpu0 nvswitch gpu7");
  CHECK(Way(a100, "gpu0", "nic1") == "gpu0 switch0 nic1");
  CHECK(Way(a100, "gpu7", "memory1") == "gpu7 switch3 cpu1 memory1");
  CHECK(Way(a100, "gpu0", "memory1") == "gpu0 switch0 cpu0 cpu1 memory1");
  CHECK(Way(a100, "memory0", "gpu1") == "memory0 cpu0 switch0 gpu1");
  const NodeType box = LoadCluster("pcie-8x4090").node;
  CHECK(Way(box, "gpu0", "gpu3") == "gpu0 cpu0 gpu3");
  CHECK(Way(box, "gpu0", "gpu4") == "gpu0 cpu0 cpu1 gpu4");
  // No GPU forwards for another: GPU 0 and GPU 5 of the cube mesh have no common link.
  const NodeType cube = LoadCluster("dgx-v100").node;
  CHECK(Way(cube, "gpu0", "gpu4") == "gpu0 gpu4");
  CHECK(Way(cube, "gpu0", "gpu5") == "gpu0 switch0 cpu0 cpu1 switch2 gpu5");
}

TEST_CASE("Routing: rate is the slowest hop's, latency the sum, by direction") {
  const NodeType node = LoadCluster("data/topologies/new_cluster.json").node;
  const Route down = FindRoute(node, Find(node, "dram"), Find(node, "gpu3"));
  CHECK(down.hops.size() == 3);
  CheckRate(down.rate, 60);
  CHECK(std::abs(down.latency.value - 1.5e-6) < 1e-18);
  // gpu -> xbar 100 GB/s forward, xbar -> gpu 80 GB/s backward.
  CheckRate(FindRoute(node, Find(node, "gpu0"), Find(node, "gpu1")).rate, 80);
}

TEST_CASE("Routing: host copies share PCIe switches, by hand") {
  HostCopyRates rates = FindHostCopyRates(LoadCluster("dgx-a100"));
  CheckRate(rates.to_device_alone, 31.508);
  CheckRate(rates.to_device_together, 31.508 / 2);  // two GPUs behind each switch
  CheckRate(rates.to_host_together, 31.508 / 2);
  rates = FindHostCopyRates(LoadCluster("dgx-a100", 1, 1));
  CheckRate(rates.to_device_together, 31.508);
  rates = FindHostCopyRates(LoadCluster("dgx-h100"));
  CheckRate(rates.to_device_together, 63.015);
  // Grace: one memory of 384 GB/s for two GPUs with 450 GB/s each.
  rates = FindHostCopyRates(LoadCluster("gb200-nvl72"));
  CheckRate(rates.to_device_alone, 384);
  CheckRate(rates.to_device_together, 192);
}

TEST_CASE("Routing: node network rate, by hand") {
  CheckRate(NodeNetworkRate(LoadCluster("dgx-h100")), 400);
  CheckRate(NodeNetworkRate(LoadCluster("dgx-h100", 1, 2)), 100);
  CheckRate(NodeNetworkRate(LoadCluster("p3dn")), 12.5);
  CheckRate(NodeNetworkRate(LoadCluster("p5en")), 16 * 25);
  CHECK(NodeNetworkRate(LoadCluster("h200-1x")) == BytesPerSecond(0));
}

}  // namespace
}  // namespace shardwright
