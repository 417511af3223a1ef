#include "topologies/cluster.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <doctest/doctest.h>

#include "core/cores.h"
#include "core/error.h"
#include "core/json.h"
#include "topologies/gpu_names.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

std::int64_t Count(const Cluster& cluster, ComponentKind kind) {
  return std::count_if(cluster.node.components.begin(), cluster.node.components.end(),
                       [&](const Component& c) { return c.kind == kind; });
}

bool HasOrigin(const Origin& origin) {
  const bool may_be_undated = origin.kind == NumberKind::kAssumed;
  return !origin.source.empty() && (may_be_undated || !origin.date.empty());
}

TEST_CASE("Cluster: the catalog has every system the project promises") {
  std::set<std::string> names;
  for (const ClusterSummary& summary : ListClusters()) {
    CHECK(names.insert(summary.name).second);
  }
  for (const char* name :
       {"dgx-a100", "dgx-a100-40", "dgx-h100",       "dgx-h200",    "dgx-b200",     "gb200-nvl72",
        "p3dn",     "p4d",         "p4de",           "p5",          "p5en",         "a3-high",
        "a3-mega",  "a3-ultra",    "nd-a100-v4",     "ndm-a100-v4", "nd-h100-v5",   "pcie-8x4090",
        "v100-4x",  "dgx-v100",    "meta-h100-roce", "h200-1x",     "nd-mi300x-v5", "oci-mi355x"}) {
    CAPTURE(name);
    CHECK(names.count(name) == 1);
  }
}

TEST_CASE("Cluster: every catalog entry is whole and every number has an origin") {
  for (const ClusterSummary& summary : ListClusters()) {
    CAPTURE(summary.name);
    const Cluster cluster = LoadCluster(summary.name);
    CHECK(cluster.name == summary.name);  // the file is named after the cluster
    CHECK(cluster.spec == summary.name);
    CHECK_FALSE(cluster.description.empty());
    CHECK(cluster.node.host_memory > Bytes(0));
    CHECK(cluster.node.pinned_limit > Bytes(0));
    CHECK(cluster.gpus_per_node == Count(cluster, ComponentKind::kGpu));
    for (const Component& component : cluster.node.components) {
      CHECK(HasOrigin(component.origin));
    }
    for (const Link& link : cluster.node.links) {
      CHECK(HasOrigin(link.origin));
    }
    for (const FabricLevel& level : cluster.fabric) {
      CHECK(HasOrigin(level.origin));
    }
    const HostCopyRates copies = FindHostCopyRates(cluster);
    CHECK(copies.to_device_together.value > 0);
    CHECK(copies.to_device_together <= copies.to_device_alone);
    if (summary.gpus_per_node > 1) {
      CHECK(summary.scale_up.value > 0);
      CHECK(summary.network_rate.value > 0);
    }
  }
}

// Published node totals, one way in GB/s: NIC count times rate as the makers state them.
TEST_CASE("Cluster: published network rates and memory sizes") {
  const auto network = [](const char* name) { return NodeNetworkRate(LoadCluster(name)).value; };
  CHECK(network("dgx-a100") == 200e9);
  CHECK(network("dgx-h100") == 400e9);
  CHECK(network("p4d") == 50e9);
  CHECK(network("p5") == 400e9);
  CHECK(network("a3-high") == 100e9);
  CHECK(network("a3-mega") == 200e9);
  CHECK(network("a3-ultra") == 400e9);
  CHECK(LoadCluster("dgx-h100").node.host_memory == Bytes(2'000'000'000'000));
  CHECK(LoadCluster("gb200-nvl72").node.host_memory == Bytes(36LL * 480'000'000'000));
}

TEST_CASE("Cluster: GPUs carry the makers' numbers") {
  const GpuSpec& h100 = FindGpu("h100-80", "test");
  CHECK(h100.memory_bandwidth.value == BytesPerSecond(3.35e12));
  CHECK(PeakFlops(h100, MathType::kBf16) == FlopsPerSecond(989e12));
  CHECK(PeakFlops(h100, MathType::kFp8) == FlopsPerSecond(1979e12));
  CHECK(h100.sm_count.value == 132);
  CHECK(h100.usable_memory.value == ParseBytes("79.19 GiB", ""));
  CHECK(h100.usable_memory.origin.kind == NumberKind::kPublished);
  const GpuSpec& v100 = FindGpu("v100-32", "test");
  CHECK_FALSE(PeakFlops(v100, MathType::kBf16).has_value());
  CHECK(PeakFlops(v100, MathType::kFp16) == FlopsPerSecond(125e12));
  CHECK(v100.memory_bandwidth.origin.kind == NumberKind::kUnverified);
  CHECK(GpuCatalog().size() >= 23);
  for (const GpuSpec& gpu : GpuCatalog()) {
    CAPTURE(gpu.name);
    CHECK(HasOrigin(gpu.memory.origin));
    CHECK(HasOrigin(gpu.usable_memory.origin));
    CHECK(HasOrigin(gpu.memory_bandwidth.origin));
    CHECK(gpu.usable_memory.value <= gpu.memory.value);
    CHECK(PeakFlops(gpu, MathType::kFp32).has_value());
  }
}

TEST_CASE("Cluster: parts of nodes and many nodes") {
  const Cluster part = LoadCluster("dgx-h100", 2, 3);
  CHECK(part.RankCount() == 6);
  CHECK(Count(part, ComponentKind::kGpu) == 8);
}

// Multiplicity is a number: nothing grows with it.
TEST_CASE("Cluster: 100,000 GPUs are stored like 8") {
  const Cluster one = LoadCluster("dgx-h100");
  Cluster many = LoadCluster("dgx-h100", 12500);
  CHECK(many.RankCount() == 100000);
  many.node_count = 1;
  CHECK(many == one);
  // 8 GPUs, 8 NICs, 8 PCIe switches, an NVSwitch, two sockets with memory.
  CHECK(LoadCluster("dgx-h100", 2048).node.components.size() == 29);
}

TEST_CASE("Cluster: JSON reads back to an equal value") {
  std::vector<std::string> specs = {"data/topologies/new_cluster.json",
                                    "a100-80 x4, nic 2x100 Gbit/s, host 1 TiB, pinned 512 GiB"};
  for (const ClusterSummary& summary : ListClusters()) {
    specs.push_back(summary.name);
  }
  for (const std::string& spec : specs) {
    CAPTURE(spec);
    Cluster cluster = LoadCluster(spec, 1, 1);
    const std::string text = ClusterJson(cluster);
    const Cluster read = ParseCluster(text, "again.json");
    cluster.spec = "again.json";
    CHECK(read == cluster);
    CHECK(ClusterJson(read) == text);
  }
}

// One JSON file brings a cluster and a GPU that no code knows.
TEST_CASE("Cluster: a new cluster with a new GPU is a file and no branch") {
  const Cluster cluster = LoadCluster("data/topologies/new_cluster.json");
  CHECK(cluster.name == "new-cluster");
  CHECK(cluster.spec == "data/topologies/new_cluster.json");
  CHECK(cluster.RankCount() == 32);
  CHECK(cluster.gpu.full_name == "chip-1");
  CHECK(cluster.gpu.usable_memory.origin.kind == NumberKind::kMeasured);
  CHECK(cluster.gpu.usable_memory.spread == 0.01);
  CHECK(cluster.gpu.memory.origin.source == "invented for this test");
  CHECK(PeakFlops(cluster.gpu, MathType::kBf16) == FlopsPerSecond(400e12));
  CHECK_FALSE(PeakFlops(cluster.gpu, MathType::kFp8).has_value());
  CHECK(cluster.node.host_memory == Bytes(512LL << 30));
  CHECK(cluster.node.pinned_limit == Bytes(256LL << 30));
  const RingPath path = FindRing(cluster, {4, 1});
  CHECK(path.intra_kind == ScaleUpKind::kNvlink);
  CHECK(path.Rate() == BytesPerSecond(80e9));  // the slower direction
}

TEST_CASE("Cluster: one cluster in the ways in which people write it") {
  struct Way {
    const char* spec;
    const char* gpu;
    std::int64_t gpus, nodes;
  };
  for (const Way& way : {Way{"8xH100", "h100-80", 8, 1},
                         Way{"8 x h100", "h100-80", 8, 1},
                         Way{"H100 x8", "h100-80", 8, 1},
                         Way{"h100-80x8", "h100-80", 8, 1},
                         Way{"h100-80 x8", "h100-80", 8, 1},
                         Way{"2x8 H100, nic 200 Gbit/s", "h100-80", 8, 2},
                         Way{"2x H100 x8, nic 200 Gbit/s", "h100-80", 8, 2},
                         Way{"H200", "h200-141", 1, 1},
                         Way{"4xA100-80, nic 200 Gbit/s", "a100-80", 4, 1},
                         Way{"16x8 H100-80, nvlink 450 GB/s, nic 8x400 Gbit/s", "h100-80", 8, 16},
                         Way{"DGX-H100", "h100-80", 8, 1},
                         Way{"4x dgx-h100", "h100-80", 8, 4},
                         Way{"pcie-8x4090", "rtx-4090", 8, 1},
                         Way{"MI300X x8", "mi300x", 8, 1},
                         Way{"2x4090", "rtx-4090", 2, 1},
                         Way{"RTX 4090 x2", "rtx-4090", 2, 1},
                         Way{"8xA100-80GB", "a100-80", 8, 1},
                         Way{"8xH100-SXM", "h100-80", 8, 1},
                         Way{"4xRTX5090", "rtx-5090", 4, 1},
                         Way{"2xRTXA6000", "rtx-a6000", 2, 1},
                         Way{"8xH100PCIe", "h100-pcie-80", 8, 1},
                         Way{"8x H100 PCIe", "h100-pcie-80", 8, 1},
                         Way{"4xH100NVL", "h100-nvl-94", 4, 1},
                         Way{"8xRTX 4090", "rtx-4090", 8, 1},
                         Way{"RTX PRO 6000 x8", "rtx-pro-6000", 8, 1},
                         Way{"2xRTX6000Ada", "rtx-6000-ada", 2, 1},
                         Way{"8xH100 SXM", "h100-80", 8, 1},
                         Way{"144xGB300, nic 4x800 Gbit/s", "gb300-288", 72, 2},
                         Way{"p5.48xlarge", "h100-80", 8, 1},
                         Way{"g5.12xlarge", "a10g", 4, 1},
                         Way{"3x g6e.48xlarge", "l40s", 8, 3},
                         Way{"g5.48xlarge x2", "a10g", 8, 2},
                         Way{"Standard_NC96ads_A100_v4", "a100-pcie-80", 4, 1},
                         Way{"4x p4de.24xlarge", "a100-80", 8, 4},
                         Way{"2 x a3-megagpu-8g", "h100-80", 8, 2},
                         Way{"Standard_ND96isr_H100_v5", "h100-80", 8, 1},
                         Way{"NVIDIA H100 80GB HBM3", "h100-80", 1, 1},
                         Way{"Tesla T4", "t4", 1, 1},
                         Way{"64xH100, nic 8x400 Gbit/s", "h100-80", 8, 8},
                         Way{"72xGB200", "gb200-186", 72, 1},
                         Way{"16xA100-40", "a100-40", 16, 1},
                         Way{"10x4090", "rtx-4090", 10, 1},
                         Way{"h100-80 x16, nvlink 450 GB/s", "h100-80", 16, 1}}) {
    CAPTURE(way.spec);
    const Cluster cluster = LoadCluster(way.spec);
    CHECK(cluster.gpu.name == way.gpu);
    CHECK(cluster.gpus_per_node == way.gpus);
    CHECK(cluster.node_count == way.nodes);
    CHECK(LoadCluster(way.spec, 1).node_count == 1);  // flags win
  }
  CHECK(LoadCluster("2x8 H100, nic 4x200 Gbit/s") ==
        LoadCluster("h100-80 x8, nic 4x200 Gbit/s", 2));
  CHECK_THROWS_AS((void)LoadCluster("2x8 H100, nodes 3, nic 4x200 Gbit/s"), InputError);
  CHECK_THROWS_WITH_AS((void)LoadCluster("tpu-v5p"),
                       "cluster: got \"tpu-v5p\", expected a name from `shardwright list "
                       "clusters`, a .json file (also with a card of your own) or a description "
                       "such as \"h100-80 x8, nvlink 450 "
                       "GB/s, nic 4x200 Gbit/s\"; only GPUs of NVIDIA and AMD are modelled",
                       InputError);
  CHECK_THROWS_WITH_AS((void)LoadCluster("12xH100, nic 400 Gbit/s"),
                       "cluster: got \"12xH100, nic 400 Gbit/s\", expected whole nodes: one has at "
                       "most 8 x h100-80; say nodes and GPUs, such as \"3x4xh100-80\"",
                       InputError);
}

TEST_CASE("Cluster: inline descriptions") {
  Cluster cluster = LoadCluster("h100-80 x8, nvlink 450 GB/s, nic 4x200 Gbit/s", 2);
  CHECK(cluster.RankCount() == 16);
  CHECK(cluster.name == "inline");
  CHECK(cluster.spec == "h100-80 x8, nvlink 450 GB/s, nic 4x200 Gbit/s");
  CHECK(FindRing(cluster, {8, 1}).Rate() == BytesPerSecond(450e9));
  CHECK(FindRing(cluster, {16, 1}).Rate() == BytesPerSecond(100e9));
  CHECK(FindRing(cluster, {2, 8}).Rate() == BytesPerSecond(12.5e9));
  CHECK(cluster.node.host_memory == Bytes(0));
  CHECK(FindHostCopyRates(cluster).to_device_together == BytesPerSecond(63.015e9));

  cluster = LoadCluster(
      "a100-80 x4, nvlink none, pcie 25 GB/s, host 1 TiB, pinned 512 GiB, nic 100 Gbit/s, "
      "network roce, nodes 64, level leaf 16 nodes, level pod 32 nodes 4:1");
  CHECK(cluster.node_count == 64);
  CHECK(cluster.network == "roce");
  CHECK(cluster.node.host_memory == Bytes(std::int64_t{1} << 40));
  CHECK(cluster.node.pinned_limit == Bytes(std::int64_t{1} << 39));
  CHECK(FindRing(cluster, {4, 1}).intra_kind == ScaleUpKind::kPcie);
  CHECK(FindRing(cluster, {4, 1}).Rate() == BytesPerSecond(25e9));
  REQUIRE(cluster.fabric.size() == 2);
  CHECK(cluster.fabric[1].name == "pod");
  CHECK(cluster.fabric[1].group_nodes == 32);
  CHECK(cluster.fabric[1].oversubscription == 4);

  cluster = LoadCluster("h200-141");
  CHECK(cluster.RankCount() == 1);
  // The data sheet's NVLink when nothing is said.
  CHECK(FindRing(LoadCluster("b200-180 x2"), {2, 1}).Rate() == BytesPerSecond(900e9));
  CHECK(LoadCluster("rtx-4090 x2").gpu.name == "rtx-4090");
  // A full mesh of seven links carries what a switch does, and xgmi is AMD's word for them.
  CHECK(FindRing(LoadCluster("nd-mi300x-v5"), {8, 1}).Rate() == BytesPerSecond(7 * 64e9));
  CHECK(FindRing(LoadCluster("oci-mi355x"), {8, 1}).Rate() == BytesPerSecond(7 * 76.5e9));
  CHECK(FindRing(LoadCluster("mi300x x8, xgmi 300 GB/s"), {8, 1}).Rate() == BytesPerSecond(300e9));
}

// GPUs without peer-to-peer links: half of eight stand on another socket, as in the catalog's box.
TEST_CASE("Cluster: a box of GPUs on PCIe is the same by its name and described") {
  const Cluster box = LoadCluster("pcie-8x4090");
  for (const char* described : {"rtx-4090 x8", "rtx-4090 x8, nic 100 Gbit/s, host 512 GB"}) {
    CAPTURE(described);
    const Cluster inlined = LoadCluster(described);
    for (const GroupShape& shape : {GroupShape{8, 1}, GroupShape{4, 1}, GroupShape{2, 1},
                                    GroupShape{2, 4}, GroupShape{4, 2}}) {
      CAPTURE(shape.size);
      CAPTURE(shape.stride);
      CHECK(FindRing(inlined, shape).Rate() == FindRing(box, shape).Rate());
    }
  }
  CHECK(FindRing(LoadCluster("rtx-4090 x8", 1), {8, 1}).Rate() == BytesPerSecond(16e9));
  // Not so with links of their own, and with four.
  CHECK(FindRing(LoadCluster("a100-80 x8"), {8, 1}).Rate() == BytesPerSecond(300e9));
  CHECK(FindRing(LoadCluster("rtx-4090 x4"), {4, 1}).Rate() == BytesPerSecond(31.508e9));
}

TEST_CASE("Cluster: the GPUs that people ask for are there") {
  for (const auto& [name, gib, tflops] :
       std::vector<std::tuple<const char*, double, double>>{{"h20-96", 96, 148},
                                                            {"mi325x", 256, 1307.4},
                                                            {"mi355x", 288, 2500},
                                                            {"rtx-5090", 32, 209.5},
                                                            {"l40s", 48, 362},
                                                            {"l40", 48, 181.05},
                                                            {"h100-nvl-94", 94, 835},
                                                            {"h200-nvl-141", 141, 835},
                                                            {"gb300-288", 288, 2500},
                                                            {"a10g", 24, 70},
                                                            {"a30", 24, 165},
                                                            {"a40", 48, 149.7},
                                                            {"rtx-6000-ada", 48, 364.2},
                                                            {"rtx-pro-6000", 96, 500}}) {
    const GpuSpec gpu = FindGpu(name, "test");
    CAPTURE(gpu.name);
    CHECK(gpu.memory.value == Bytes(static_cast<std::int64_t>(gib) << 30));
    CHECK(PeakFlops(gpu, MathType::kBf16) == FlopsPerSecond(tflops * 1e12));
  }
  const GpuSpec t4 = FindGpu("t4", "test");
  CHECK(!PeakFlops(t4, MathType::kBf16));
  CHECK(PeakFlops(t4, MathType::kFp16) == FlopsPerSecond(65e12));
}

TEST_CASE("Cluster: GPUs by what tools call them") {
  for (const auto& row : std::vector<std::pair<const char*, const char*>>{
           {"NVIDIA H100 80GB HBM3", "h100-80"},
           {"NVIDIA H100 PCIe", "h100-pcie-80"},
           {"NVIDIA H200", "h200-141"},
           {"NVIDIA GH200 480GB", "gh200-96"},
           {"NVIDIA GH200 144G HBM3e", "gh200-141"},
           {"NVIDIA B200", "b200-180"},
           {"NVIDIA GB200", "gb200-186"},
           {"NVIDIA A100-SXM4-80GB", "a100-80"},
           {"NVIDIA A100 80GB PCIe", "a100-pcie-80"},
           {"NVIDIA A100-PCIE-40GB", "a100-pcie-40"},
           {"Tesla V100-SXM2-32GB", "v100-32"},
           {"Tesla T4", "t4"},
           {"NVIDIA A10", "a10"},
           {"NVIDIA A10G", "a10g"},
           {"NVIDIA L4", "l4"},
           {"NVIDIA L40S", "l40s"},
           {"NVIDIA L40", "l40"},
           {"NVIDIA H100 NVL", "h100-nvl-94"},
           {"NVIDIA H200 NVL", "h200-nvl-141"},
           {"NVIDIA GB300", "gb300-288"},
           {"NVIDIA GeForce RTX 3090", "rtx-3090"},
           {"NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"},
           {"NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"}}) {
    const std::string product = row.first;
    CAPTURE(product);
    CHECK(GpuOfProduct(product) == row.second);
    CHECK(FindGpu(GpuOfProduct(product), "test").name == row.second);
  }
  for (const char* other :
       {"NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40 NVL",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "dgx-a10", "my h200", "NVIDIA", ""}) {
    CAPTURE(std::string(other));
    CHECK(GpuOfProduct(other) == "");
  }
  CHECK_THROWS_AS((void)LoadCluster("dgx-h200-x"), InputError);
  for (const char* device : {"0x2330", "2335", "2901", "1eb8", "20b5"}) {
    CAPTURE(std::string(device));
    CHECK(FindGpu(GpuOfPciDevice(device), "test").name == GpuOfPciDevice(device));
  }
  CHECK(GpuOfPciDevice("0x0001") == "");
}

TEST_CASE("The host's cores are those that this process may use, and a file keeps them") {
  const Cluster host = LoadCluster("host", 2, 4);
  CHECK(host.machine_cores == AvailableCores());
  CHECK(host.node_cores == 0);
  CHECK(host.SharedCores() == AvailableCores());
  CHECK(host.RanksOnCores() == 8);  // both nodes are emulated here
  Cluster other = host;
  other.machine_cores = 1.5;
  CHECK(ParseCluster(ClusterJson(other), "c.json").machine_cores == 1.5);
  other.machine_cores = 0;
  other.node_cores = 16;
  const Cluster read = ParseCluster(ClusterJson(other), "c.json");
  CHECK(read.node_cores == 16);
  CHECK(read.SharedCores() == 16);
  CHECK(read.RanksOnCores() == 4);
  CHECK(LoadCluster("dgx-h100").SharedCores() == 0);
  CHECK(CoresText(1) == "1 core");
  CHECK(CoresText(1.5) == "1.5 cores");
}

}  // namespace
}  // namespace shardwright
