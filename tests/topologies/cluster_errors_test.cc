// Whole texts of what the user reads when a cluster is wrong.

#include <fstream>
#include <iterator>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "topologies/cluster.h"

namespace shardwright {
namespace {

std::string LoadError(const std::string& spec, std::int64_t nodes = 0, std::int64_t gpus = 0) {
  try {
    (void)LoadCluster(spec, nodes, gpus);
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

// new_cluster.json with one piece of text replaced.
std::string FileError(const std::string& from, const std::string& to) {
  std::ifstream in("data/topologies/new_cluster.json");
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  text.replace(at, from.size(), to);
  try {
    (void)ParseCluster(text, "c.json");
  } catch (const InputError& e) {
    return e.what();
  }
  return "no error";
}

TEST_CASE("Cluster errors: names") {
  CHECK(LoadError("dgx-h10") ==
        "cluster: got \"dgx-h10\", expected a name from `shardwright list clusters`, a .json file "
        "(also with a card of your own) or a description such as \"h100-80 x8, nvlink 450 GB/s, "
        "nic 4x200 Gbit/s\"; did you mean "
        "\"dgx-h100\"?");
  CHECK(LoadError("something-else-entirely") ==
        "cluster: got \"something-else-entirely\", expected a name from `shardwright list "
        "clusters`, a .json file (also with a card of your own) or a description such as \"h100-80 "
        "x8, nvlink 450 GB/s, nic "
        "4x200 Gbit/s\"");
  CHECK(LoadError("no/such.json") == "no/such.json: got no such file, expected a file");
}

TEST_CASE("Cluster errors: sizes") {
  CHECK(LoadError("dgx-h100", 1, 9) ==
        "cluster dgx-h100: got 9 GPUs of each node, expected 1 to 8");
  CHECK(LoadError("dgx-h100", -1) == "cluster dgx-h100: got -1 nodes, expected 1 to 10000000");
  CHECK(LoadError("dgx-h100", 1, -2) ==
        "cluster dgx-h100: got -2 GPUs of each node, expected 1 to 8");
  CHECK(LoadError("dgx-h100", std::int64_t{1} << 60) ==
        "cluster dgx-h100: got 1152921504606846976 nodes, expected 1 to 10000000");
  CHECK(LoadError("h200-1x", 2) ==
        "cluster h200-1x: got 2 nodes, expected 1 node, since its nodes have no NIC; "
        "a description has them, such as \"8xH100, nic 8x400 Gbit/s, nodes 2\"");
}

TEST_CASE("Cluster errors: units and types in files") {
  CHECK(FileError("\"2 TB/s\"", "\"2 TB\"") ==
        "c.json: gpu.memory_bandwidth: got \"2 TB\", expected a rate such as \"50 GB/s\" or \"400 "
        "Gbit/s\"; did you mean \"TB/s\"?");
  CHECK(FileError("\"200 Gbit/s\"", "200") ==
        "c.json: node.components[5].bandwidth: got 200, expected a rate such as \"50 GB/s\" or "
        "\"400 Gbit/s\"");
  CHECK(FileError("\"512 GiB\"", "\"-512 GiB\"") ==
        "c.json: node.components[4].capacity: got \"-512 GiB\", expected a size such as \"80 GiB\" "
        "or \"512 MB\"; it must not be negative");
  CHECK(FileError("\"100 GB/s\"", "\"0 GB/s\"") ==
        "c.json: node.links[0].bandwidth: got \"0 GB/s\", expected a rate above 0");
  CHECK(FileError("\"date\": \"2026-11-20\"", "\"date\": \"yesterday\"") ==
        "c.json: gpu.usable_memory.date: got \"yesterday\", expected a date such as "
        "\"2026-11-21\"");
  CHECK(FileError("\"kind\": \"measured\"", "\"kind\": \"mesured\"") ==
        "c.json: gpu.usable_memory.kind: got \"mesured\", expected one of \"spec\", \"published\", "
        "\"measured\", \"fitted\", \"unverified\", \"assumed\"; did you mean \"measured\"?");
  CHECK(FileError("\"sm_count\": 100", "\"sm_count\": 1e30") ==
        "c.json: gpu.sm_count: got 1e+30, expected an integer from 0 to 1000000");
  CHECK(FileError("\"version\": 1", "\"version\": 2") ==
        "c.json: version: got 2, expected version 1, the only one this program knows");
  CHECK(FileError("shardwright-cluster", "shardwright-plan") ==
        "c.json: format: got \"shardwright-plan\", expected \"shardwright-cluster\"");
}

TEST_CASE("Cluster errors: unknown, missing and absurd fields") {
  CHECK(FileError("\"pinned_limit\"", "\"pined_limit\"") ==
        "c.json: node: got unknown key \"pined_limit\", expected one of \"components\", \"links\", "
        "\"pinned_limit\", \"kind\", \"source\", \"date\"; did you mean \"pinned_limit\"?");
  CHECK(FileError("\"sm_count\": 100,", "") ==
        "c.json: gpu: got no key \"sm_count\", expected one");
  CHECK(FileError(
            "\"kind\": \"assumed\",\n    \"source\": \"invented for this test\",\n    \"date\": "
            "\"2026-11-21\",\n    \"components\"",
            "\"components\"") ==
        "c.json: node.components[0]: got no origin, expected \"kind\", \"source\" and \"date\" "
        "here or around");
  CHECK(FileError("\"count\": 4", "\"count\": 1000000000000") ==
        "c.json: node.components[0].count: got 1000000000000, expected an integer from 1 to "
        "100000");
  CHECK(FileError("\"count\": 4", "\"count\": 100000") ==
        "c.json: node.components[0].count: got 100000, expected at most 4096 components in a node");
  CHECK(FileError("\"count\": 4", "\"count\": -4") ==
        "c.json: node.components[0].count: got -4, expected an integer from 1 to 100000");
  CHECK(FileError("\"oversubscription\": 2", "\"oversubscription\": 0") ==
        "c.json: fabric[0].oversubscription: got 0, expected a ratio from 0.01 to 1000");
  CHECK(FileError("\"256 GiB\"", "\"1 TiB\"") ==
        "c.json: node.pinned_limit: got \"1 TiB\", expected at most the host memory, 512 GiB");
  CHECK(FileError("\"type\": \"cpu\"}", "\"type\": \"cpu\", \"capacity\": \"1 GiB\"}") ==
        "c.json: node.components[3].capacity: got \"1 GiB\", expected no capacity, since only host "
        "memory has one");
  CHECK(FileError("\"name\": \"spine\"", "\"group_nodes\": 3, \"name\": \"spine\"") ==
        "c.json: fabric: got the level \"spine\" inside an inner one, expected levels with growing "
        "group_nodes, all nodes last");
}

TEST_CASE("Cluster errors: the node's graph") {
  CHECK(FileError("\"from\": \"cpu\", \"to\": \"dram\"", "\"from\": \"cpu\", \"to\": \"dran\"") ==
        "c.json: node.links[4].to: got \"dran\", expected a component of this node; did you mean "
        "\"dram\"?");
  CHECK(FileError("\"from\": \"cpu\", \"to\": \"dram\"", "\"from\": \"cpu\", \"to\": \"cpu\"") ==
        "c.json: node.links[4]: got a link from \"cpu\" to itself, expected two different "
        "components");
  CHECK(
      FileError("{\"from\": \"cpu\", \"to\": \"dram\", \"type\": \"memory\", \"bandwidth\": \"200 "
                "GB/s\"}",
                "{\"from\": \"cpu\", \"to\": \"gpu0\", \"type\": \"memory\", \"bandwidth\": \"200 "
                "GB/s\"}") ==
      "c.json: node.links: got \"dram\" not connected to \"gpu0\", expected links that join all "
      "components");
  CHECK(FileError("{\"from\": \"cpu\", \"to\": \"dram\"",
                  "{\"from\": \"switch0\", \"to\": \"switch1\", \"type\": \"pcie\", "
                  "\"bandwidth\": \"1 GB/s\"}, {\"from\": \"cpu\", \"to\": \"dram\"") ==
        "c.json: node.links: got a cycle of PCIe links closed between \"switch0\" and "
        "\"switch1\", expected a tree; links between sockets have the type \"cpu\"");
  CHECK(FileError("{\"from\": \"cpu\", \"to\": \"dram\"",
                  "{\"from\": \"switch1\", \"to\": \"gpu2\", \"type\": \"pcie\", \"bandwidth\": "
                  "\"1 GB/s\"}, {\"from\": \"cpu\", \"to\": \"dram\"") ==
        "c.json: node.links[4]: got a second link between \"switch1\" and \"gpu2\", expected one "
        "link with the sum of the bandwidths");
  CHECK(FileError("\"name\": \"switch\", \"type\": \"pcie_switch\", \"count\": 2",
                  "\"name\": \"switch\", \"type\": \"pcie_switch\", \"count\": 3") ==
        "c.json: node.links[1]: got 4 components linked to 3, expected counts that divide, or the "
        "pattern \"all\"");
  CHECK(FileError("\"name\": \"xbar\"", "\"name\": \"gpu1\"") ==
        "c.json: node.components[1].name: got a second component \"gpu1\", expected each name "
        "once");
  CHECK(FileError("\"type\": \"gpu\"", "\"type\": \"nvswitch\"") ==
        "c.json: node.components: got no GPU, expected at least one");
}

TEST_CASE("Cluster errors: truncated files") {
  std::ifstream in("data/topologies/new_cluster.json");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::string error;
  try {
    (void)ParseCluster(text.substr(0, text.find(",\n  \"name\"")), "c.json");
  } catch (const InputError& e) {
    error = e.what();
  }
  CHECK(error == "c.json:3:15: got end of input, expected '}'");
}

TEST_CASE("Cluster errors: inline descriptions") {
  CHECK(LoadError("a100-48 x8, nvlink 300 GB/s") ==
        "cluster: got \"a100-48 x8, nvlink 300 GB/s\", expected a name from `shardwright list "
        "clusters`, a .json file (also with a card of your own) or a description such as \"h100-80 "
        "x8, nvlink 450 GB/s, nic 4x200 "
        "Gbit/s\"; write the count as \"x48\", or the memory as \"48GB\"; the catalog has of that "
        "name a100-40, a100-80, a100-pcie-80, a100-pcie-40, a100-64");
  CHECK(LoadError("h100-80 x8, nvlink 450") ==
        "cluster description: nvlink: got \"450\", expected a rate such as \"50 GB/s\" or \"400 "
        "Gbit/s\"; the unit is missing");
  CHECK(LoadError("h100-80 x8, nvlnk 450 GB/s") ==
        "cluster description: got \"nvlnk 450 GB/s\", expected nvlink, xgmi, nic, pcie, host, "
        "pinned, network, nodes or level; did you mean \"nvlink\"?");
  CHECK(LoadError("mi300x x8, xgmi 448 GB/s, nvlink 448 GB/s") ==
        "cluster description: got \"nvlink\" a second time, expected it once");
  CHECK(LoadError("h100-80 x0, nic 1 GB/s") ==
        "cluster description: GPU count: got \"0\", expected a count from 1 to 1024");
  CHECK(LoadError("h100-80 x99999999999999999999") ==
        "cluster description: GPU count: got \"99999999999999999999\", expected a count from 1 to "
        "1024");
  CHECK(
      LoadError("h100-80 8") ==
      "cluster description: got \"h100-80 8\", expected a GPU and a count such as \"h100-80 x8\"");
  CHECK(LoadError("h100-80 x8, nic 0x200 Gbit/s") ==
        "cluster description: nic: got \"0\", expected a count from 1 to 1024");
  CHECK(LoadError("h100-80 x8, nic 1 GB/s, nic 2 GB/s") ==
        "cluster description: got \"nic\" a second time, expected it once");
  CHECK(LoadError("h100-80 x8, level pod") ==
        "cluster description: level: got \"pod\", expected a name, a count and a ratio such as "
        "\"pod 384 nodes 7:1\"");
  CHECK(LoadError("h100-80 x8, pinned 1 GiB") ==
        "cluster description: pinned: got 1 GiB, expected at most the host memory, 0 B");
  for (const std::string spec : {"dgx-h100, host 4 TiB", "4x dgx-h100, host 4 TiB"}) {
    CHECK(LoadError(spec) ==
          "cluster: got \"" + spec +
              "\", expected nothing behind the name of a cluster of the catalog, "
              "or a description of its own that begins with a GPU");
  }
  CHECK(LoadError("h100-80 x8, nodes 2") ==
        "cluster description: got 2 nodes, expected 1 node, since its nodes have no NIC; "
        "a description has them, such as \"8xH100, nic 8x400 Gbit/s, nodes 2\"");
  CHECK(LoadError("h100-80 x8,") ==
        "cluster description: got \"\", expected nvlink, xgmi, nic, pcie, host, pinned, network, "
        "nodes or level");
}

TEST_CASE("Cluster errors: cores") {
  const auto with = [](const std::string& fields) {
    return FileError("\"format\"", fields + ", \"format\"");
  };
  CHECK(with("\"node_cores\": 0") == "c.json: node_cores: got 0, expected above 0, at most 100000");
  CHECK(with("\"machine_cores\": -1") ==
        "c.json: machine_cores: got -1, expected above 0, at most 100000");
  CHECK(with("\"machine_cores\": \"that one\"") ==
        "c.json: machine_cores: got \"that one\", expected a number of cores or \"this machine\"");
  CHECK(with("\"node_cores\": 4, \"machine_cores\": 4") ==
        "c.json: machine_cores: got 4, expected one of node_cores and machine_cores");
  CHECK(with("\"rank_threads\": 2") ==
        "c.json: rank_threads: got 2, expected node_cores or machine_cores beside it");
  CHECK(with("\"node_cores\": 4, \"rank_threads\": 0") ==
        "c.json: rank_threads: got 0, expected an integer from 1 to 1024");
  CHECK(with("\"node_cores\": 4, \"rank_threads\": 2") == "no error");
  CHECK(with("\"node_cores\": 1.5") == "no error");
}

}  // namespace
}  // namespace shardwright
