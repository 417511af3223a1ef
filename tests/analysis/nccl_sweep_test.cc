#include "analysis/nccl_sweep.h"

#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

const std::string kHeader =
    "source,system,gpu,gpus,nodes,gpus_per_node,network,op,bytes,time_us,notes\n";

std::string ErrorOf(const std::string& text) {
  try {
    (void)ParseSweep(text, "s.csv");
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

SweepRow RowOf(const std::string& line) {
  return ParseSweep(kHeader + line, "s.csv").at(0);
}

std::string SkipOf(const std::string& line) {
  SweepSkip skip;
  return PlaceOfRow(RowOf(line), skip) ? "placed" : skip.reason;
}

TEST_CASE("Sweeps: a row as it stands, and fields that may be empty") {
  const SweepRow row = RowOf(
      "github.com/a/b/file.md@123 L1,\"GCP, a3\",H100,16,2,8,RoCE "
      "8x400Gb/s,all_gather,1048576,79.74,x");
  CHECK(row.line == 2);
  CHECK(row.system == "GCP, a3");
  CHECK(row.gpus == 16);
  CHECK(row.bytes == Bytes(1048576));
  CHECK(row.time.value * 1e6 == doctest::Approx(79.74));
  CHECK(ShortSource(row) == "a/b");
  const SweepRow empty = RowOf("page section 3,s,H100,,,,IB ,all_gather,,,");
  CHECK(empty.gpus == 0);
  CHECK(empty.bytes == Bytes(0));
  CHECK(ShortSource(empty) == "page");
}

TEST_CASE("Sweeps: bad tables are refused with the place") {
  CHECK(ErrorOf("source,system\na,b\n") ==
        "s.csv: line 1: got no column gpu, expected a table of collective measurements");
  CHECK(ErrorOf(kHeader + "a,s,H100,8,1,8,n,all_gather,12,fast,\n") ==
        "s.csv: line 2: time_us: got \"fast\", expected a positive number or nothing");
  CHECK(ErrorOf(kHeader + "a,s,H100,8,1,8,n,all_gather,12,-1,\n") ==
        "s.csv: line 2: time_us: got \"-1\", expected a positive number or nothing");
  CHECK(ErrorOf(kHeader + "a,s,H100,8.5,1,8,n,all_gather,12,1,\n") ==
        "s.csv: line 2: gpus: got \"8.5\", expected a positive whole number or nothing");
}

TEST_CASE("Sweeps: systems of the catalog by name, others from their columns") {
  SweepSkip skip;
  const auto place = [&](const std::string& line) { return PlaceOfRow(RowOf(line), skip).value(); };
  const SweepPlace vultr =
      place("x,Vultr HGX B200,B200-SXM,16,2,8,IB NDR 8x400Gb/s (slow),reduce_scatter,1024,40,");
  CHECK(vultr.cluster.name == "vultr-b200");
  CHECK(vultr.cluster.cpu_vendor == "amd");
  CHECK(vultr.cluster.node_count == 2);
  CHECK(vultr.fabric == "ib");
  CHECK(vultr.op == OpCode::kReduceScatter);
  CHECK(vultr.group == GroupShape{16, 1});
  const SweepPlace one = place("x,8x H200 SXM node,H200-SXM-141GB,6,1,6,NVLink4,all_reduce,8,9,");
  CHECK(one.cluster.gpu.name == "h200-141");
  CHECK(one.cluster.gpus_per_node == 6);
  CHECK(one.fabric == "hopper nvlink");
  // 4 adapters of 100 Gbit/s = 50 GB/s per node.
  const SweepPlace other =
      place("x,some cloud,A100-SXM4-80GB,32,4,8,EFA 4x100Gb/s,all_gather,1024,40,");
  CHECK(other.cluster.network == "efa");
  CHECK(NodeNetworkRate(other.cluster).value == 50e9);
  // A rate that is not given is that of the usual node: 8 x 400 Gbit/s.
  const SweepPlace unsaid =
      place("x,Nebius,H100-SXM5-80GB,16,2,8,InfiniBand (rate unstated),all_reduce,1024,40,");
  CHECK(NodeNetworkRate(unsaid.cluster).value == 400e9);
  // 18 trays in one NVLink domain are one node.
  const SweepPlace rack =
      place("x,GB200 NVL72,GB200,72,18,4,NVLink5 NVL72 (one NVLink domain),all_reduce,1024,40,");
  CHECK(rack.cluster.node_count == 1);
  CHECK(rack.cluster.gpus_per_node == 72);
  CHECK(rack.fabric == "blackwell nvlink");
  const SweepPlace pcie =
      place("x,box,RTX 5090,8,1,8,\"PCIe 5.0 x16, no NVLink\",all_reduce,1024,40,");
  CHECK(pcie.fabric == "blackwell-rtx pcie");
}

TEST_CASE("Sweeps: what cannot be predicted says why") {
  CHECK(SkipOf("x,s,H100,8,1,8,NVLink,sendrecv,1024,40,") ==
        "no such operation in programs: sendrecv");
  CHECK(SkipOf("x,s,H100,8,1,8,NVLink,all_reduce,,40,") == "no size or no time given");
  CHECK(SkipOf("x,s,H100,,1,,NVLink,all_reduce,1024,40,") == "number of GPUs or nodes not given");
  CHECK(SkipOf("x,s,RTX 5090,2,2,1,TCP socket loopback,all_gather,1024,40,") ==
        "ranks share one GPU and talk through the loopback interface: not a network");
  CHECK(SkipOf("x,s,MI355X,8,1,8,xGMI,all_reduce,1024,40,") == "GPU not in the catalog: MI355X");
  CHECK(SkipOf("x,s,H100,16,2,8,carrier pigeon,all_reduce,1024,40,") ==
        "network not known: carrier pigeon");
  CHECK(SkipOf("x,s,H100,8,1,8,NVLink,all_reduce,1024,40,") == "placed");
}

}  // namespace
}  // namespace shardwright
