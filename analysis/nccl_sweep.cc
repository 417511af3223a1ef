#include "analysis/nccl_sweep.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <utility>

#include "analysis/csv.h"
#include "analysis/csv_fields.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"

namespace shardwright {
namespace {

constexpr std::array<std::string_view, 10> kColumns = {"source", "system",        "gpu",     "gpus",
                                                       "nodes",  "gpus_per_node", "network", "op",
                                                       "bytes",  "time_us"};

// GPUs as sources write them. The first row whose part occurs counts, so longer names come first.
struct GpuName {
  std::string_view part;
  std::string_view gpu;  // in the catalog
  std::string_view nic;  // of the usual 8-GPU node, where a source does not give the NICs' rate
};
constexpr std::array<GpuName, 14> kGpuNames = {
    GpuName{"A100-SXM4-40GB", "a100-40", "8x200 Gbit/s"},
    GpuName{"A100-PCIE", "a100-pcie-80", "1x100 Gbit/s"},
    GpuName{"A100", "a100-80", "8x200 Gbit/s"},
    GpuName{"GB200", "gb200-186", "4x400 Gbit/s"},
    GpuName{"H100-PCIE", "h100-pcie-80", "1x400 Gbit/s"},
    GpuName{"H100", "h100-80", "8x400 Gbit/s"},
    GpuName{"H200", "h200-141", "8x400 Gbit/s"},
    GpuName{"B200", "b200-180", "8x400 Gbit/s"},
    GpuName{"B300", "b300-288", "8x800 Gbit/s"},
    GpuName{"MI300X", "mi300x", "8x400 Gbit/s"},
    GpuName{"V100-SXM2-32GB", "v100-32", "4x100 Gbit/s"},
    GpuName{"V100", "v100-16", "4x100 Gbit/s"},
    GpuName{"RTX 5090", "rtx-5090", "1x100 Gbit/s"},
    GpuName{"RTX 4090", "rtx-4090", "1x100 Gbit/s"},
};

// Machines that are in the catalog or have a profile of their own, by a part of the name that
// sources give them.
struct KnownSystem {
  std::string_view part;
  std::string_view cluster;  // empty: as the row describes it
  std::string_view profile;  // empty: the GPU's default
};
constexpr std::array<KnownSystem, 14> kSystems = {
    KnownSystem{"a3-highgpu", "a3-high", ""},
    KnownSystem{"a3-megagpu", "a3-mega", ""},
    KnownSystem{"a3-ultragpu", "a3-ultra", ""},
    KnownSystem{"p3dn.24xlarge", "p3dn", ""},
    KnownSystem{"p4de.24xlarge", "p4de", ""},
    KnownSystem{"p4d.24xlarge", "p4d", ""},
    KnownSystem{"p5.48xlarge", "p5", ""},
    KnownSystem{"p5en.48xlarge", "p5en", ""},
    KnownSystem{"p6-b200.48xlarge", "p6-b200", ""},
    KnownSystem{"Vultr HGX B200", "vultr-b200", ""},
    // Hosts that need some 30 us per call: see the profile.
    KnownSystem{"ND H100 v5", "nd-h100-v5", "h100-azure-host"},
    KnownSystem{"ND H200 v5", "", "h100-azure-host"},
    KnownSystem{"ND A100 v4", "ndm-a100-v4", ""},
    // An H100 node whose host needs 45 us per call: see the profile.
    KnownSystem{"SimuMax", "dgx-h100", "h100-slow-host"},
};

struct NetworkName {
  std::string_view part;
  std::string_view network;  // row of a profile's transports
};
constexpr std::array<NetworkName, 9> kNetworks = {
    NetworkName{"TCPXO", "tcpxo"},       NetworkName{"TCPX", "tcpx"},
    NetworkName{"EFA", "efa"},           NetworkName{"RoCE", "roce"},
    NetworkName{"InfiniBand", "ib"},     NetworkName{"IB ", "ib"},
    NetworkName{"Omni-Path", "opa"},     NetworkName{"Slingshot", "default"},
    NetworkName{"Ethernet", "ethernet"},
};

// "8x400" in "RoCE 8x400Gb/s" as "8x400 Gbit/s"; empty when there is none.
std::string NicsIn(const std::string& network) {
  const std::size_t unit = network.find("Gb/s");
  if (unit == std::string::npos) {
    return "";
  }
  std::size_t begin = unit;
  while (begin > 0 && (std::isdigit(static_cast<unsigned char>(network[begin - 1])) != 0 ||
                       network[begin - 1] == 'x')) {
    --begin;
  }
  const std::string count_and_rate = network.substr(begin, unit - begin);
  return count_and_rate.empty() ? "" : count_and_rate + " Gbit/s";
}

std::optional<OpCode> OpOf(std::string_view name) {
  constexpr std::array<std::pair<std::string_view, OpCode>, 5> kOps = {
      std::pair{std::string_view("all_gather"), OpCode::kAllGather},
      std::pair{std::string_view("reduce_scatter"), OpCode::kReduceScatter},
      std::pair{std::string_view("all_reduce"), OpCode::kAllReduce},
      std::pair{std::string_view("broadcast"), OpCode::kBroadcast},
      std::pair{std::string_view("alltoall"), OpCode::kAllToAll}};
  for (const auto& [known, code] : kOps) {
    if (known == name) {
      return code;
    }
  }
  return std::nullopt;
}

// Why a row cannot be placed, whatever the cluster; empty if it can.
std::string CannotPlace(const SweepRow& row) {
  if (!OpOf(row.op)) {
    return "no such operation in programs: " + row.op;
  }
  if (row.bytes.value == 0 || row.time.value == 0) {
    return "no size or no time given";
  }
  if (row.gpus < 2 || row.nodes < 1 || row.gpus_per_node < 1) {
    return "number of GPUs or nodes not given";
  }
  if (Contains(row.network, "loopback")) {
    return "ranks share one GPU and talk through the loopback interface: not a network";
  }
  return "";
}

// In one line, for systems that the catalog does not have.
std::optional<std::string> InlineSpec(const SweepRow& row, std::string& reason) {
  const auto* const gpu = std::find_if(kGpuNames.begin(), kGpuNames.end(),
                                       [&](const GpuName& g) { return Contains(row.gpu, g.part); });
  if (gpu == kGpuNames.end()) {
    reason = "GPU not in the catalog: " + row.gpu;
    return std::nullopt;
  }
  std::string spec = std::string(gpu->gpu) + " x" + std::to_string(row.gpus_per_node);
  if (Contains(row.network, "no NVLink")) {
    spec += FindGpu(gpu->gpu, "").scale_up ? ", nvlink none" : "";
  }
  if (row.nodes > 1 && !Contains(row.network, "one NVLink domain")) {
    const auto* const network =
        std::find_if(kNetworks.begin(), kNetworks.end(),
                     [&](const NetworkName& n) { return Contains(row.network, n.part); });
    if (network == kNetworks.end()) {
      reason = "network not known: " + row.network;
      return std::nullopt;
    }
    const std::string nics = NicsIn(row.network);
    spec += ", nic " + (nics.empty() ? std::string(gpu->nic) : nics) + ", network " +
            std::string(network->network);
  }
  return spec;
}

}  // namespace

std::vector<SweepRow> ParseSweep(std::string_view text, const std::string& file) {
  const CsvTable table = ParseCsv(text, file);
  table.Require(kColumns, "a table of collective measurements");
  std::vector<SweepRow> rows;
  for (const CsvRow& record : table.rows) {
    const CsvFields read{table, record};
    SweepRow& row = rows.emplace_back();
    row.line = record.line;
    row.source = read.Text("source");
    row.system = read.Text("system");
    row.gpu = read.Text("gpu");
    row.gpus = read.Count("gpus");
    row.nodes = read.Count("nodes");
    row.gpus_per_node = read.Count("gpus_per_node");
    row.network = read.Text("network");
    row.op = read.Text("op");
    row.bytes = Bytes(read.Count("bytes"));
    row.time = Seconds(1e-6 * read.Positive("time_us"));
  }
  return rows;
}

std::vector<SweepRow> ReadSweep(const std::string& file) {
  return ParseSweep(ReadTextFile(file), file);
}

std::optional<OpCode> PlaceableOp(const SweepRow& row, SweepSkip& skip) {
  const std::string reason = CannotPlace(row);
  if (!reason.empty()) {
    skip.reason = reason;
    return std::nullopt;
  }
  return OpOf(row.op);
}

std::optional<SweepPlace> PlaceOfRow(const SweepRow& row, SweepSkip& skip) {
  const std::optional<OpCode> op = PlaceableOp(row, skip);
  if (!op) {
    return std::nullopt;
  }
  SweepPlace place;
  place.op = *op;
  place.group = {row.gpus, 1};
  // One NVLink domain of several trays (GB200 NVL72) is one node to us.
  const bool is_one_domain = row.nodes == 1 || Contains(row.network, "one NVLink domain");
  const std::int64_t nodes = is_one_domain ? 1 : row.nodes;
  const std::int64_t per_node = is_one_domain ? row.gpus : row.gpus_per_node;
  const auto* const known =
      std::find_if(kSystems.begin(), kSystems.end(),
                   [&](const KnownSystem& s) { return Contains(row.system, s.part); });
  std::string spec;
  if (known != kSystems.end()) {
    spec = known->cluster;
    place.profile = known->profile;
  }
  if (spec.empty()) {
    SweepRow one_domain = row;
    one_domain.nodes = nodes;
    one_domain.gpus_per_node = per_node;
    const std::optional<std::string> inline_spec = InlineSpec(one_domain, skip.reason);
    if (!inline_spec) {
      return std::nullopt;
    }
    spec = *inline_spec;
  }
  try {
    place.cluster = LoadCluster(spec, nodes, per_node);
    const RingPath ring = FindRing(place.cluster, place.group);
    if (ring.inter_hops > 0) {
      place.fabric = place.cluster.network;
    } else {
      place.fabric = place.cluster.gpu.architecture +
                     (ring.intra_kind == ScaleUpKind::kNvlink ? " nvlink" : " pcie");
    }
  } catch (const InputError& error) {
    skip.reason = error.what();
    return std::nullopt;
  }
  return place;
}

Seconds ToolTime(const SweepRow& row) {
  // stas00/ml-engineering's benchmark takes events around each call of PyTorch's.
  constexpr Seconds kOfEachCall(15e-6);
  return Contains(row.system, "all_reduce_bench.py") ? kOfEachCall : Seconds(0);
}

std::string ShortSource(const SweepRow& row) {
  // "github.com/<owner>/<repository>" or the first words of anything else.
  constexpr std::string_view kHost = "github.com/";
  std::string text = row.source;
  if (text.starts_with(kHost)) {
    text = text.substr(kHost.size());
    const std::size_t owner = text.find('/');
    const std::size_t repository = owner == std::string::npos ? owner : text.find('/', owner + 1);
    return text.substr(0, repository);
  }
  return text.substr(0, text.find(" section"));
}

}  // namespace shardwright
