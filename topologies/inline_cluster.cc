// Clusters described in one line. The grammar is at LoadCluster in topologies/cluster.h.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/cluster.h"
#include "topologies/internal/cluster_json.h"
#include "topologies/internal/node_builder.h"

namespace shardwright::internal {
namespace {

constexpr std::string_view kWhere = "cluster description";
constexpr std::int64_t kMostGpus = 1024;
constexpr std::int64_t kMostNics = 1024;

// What the description says; rates of 0 are not given.
struct Described {
  GpuSpec gpu;
  std::int64_t gpu_count = 1;
  BytesPerSecond nvlink;
  bool has_nvlink = true;
  std::int64_t nic_count = 0;
  BytesPerSecond nic;
  BytesPerSecond pcie;
  Bytes host;
  Bytes pinned;
  std::string network = "default";
  std::vector<FabricLevel> fabric;
  std::int64_t nodes = 1;
};

std::string_view Trim(std::string_view text) {
  while (text.starts_with(' ')) {
    text.remove_prefix(1);
  }
  while (text.ends_with(' ')) {
    text.remove_suffix(1);
  }
  return text;
}

std::vector<std::string_view> Split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (true) {
    const std::size_t at = text.find(separator);
    const std::string_view part = Trim(text.substr(0, at));
    if (!part.empty() || separator == ',') {
      parts.push_back(part);
    }
    if (at == std::string_view::npos) {
      return parts;
    }
    text.remove_prefix(at + 1);
  }
}

std::string Where(std::string_view key) {
  return std::string(kWhere) + ": " + std::string(key);
}

std::int64_t ParseCount(std::string_view text, std::string_view key, std::int64_t most) {
  const std::int64_t count = IntegerIn(text).value_or(0);
  if (count < 1 || count > most) {
    throw InputError(Where(key), Quoted(text), "a count from 1 to " + std::to_string(most));
  }
  return count;
}

BytesPerSecond ParseRate(std::string_view text, std::string_view key) {
  const BytesPerSecond rate = ParseBytesPerSecond(text, Where(key));
  if (rate.value <= 0) {
    throw InputError(Where(key), '"' + std::string(text) + '"', "a rate above 0");
  }
  return rate;
}

// "leaf 32 nodes" or "pod 384 nodes 7:1"
FabricLevel ParseLevel(std::string_view text) {
  const std::vector<std::string_view> words = Split(text, ' ');
  const bool has_ratio = words.size() == 4 && words[3].ends_with(":1");
  if ((words.size() != 3 && !has_ratio) || words[2] != "nodes") {
    throw InputError(Where("level"), '"' + std::string(text) + '"',
                     "a name, a count and a ratio such as \"pod 384 nodes 7:1\"");
  }
  FabricLevel level;
  level.name = words[0];
  level.group_nodes = ParseCount(words[1], "level", 10'000'000);
  if (has_ratio) {
    level.oversubscription = NumberIn(words[3].substr(0, words[3].size() - 2)).value_or(0);
    if (!(level.oversubscription >= 0.01 && level.oversubscription <= 1000)) {
      throw InputError(Where("level"), Quoted(words[3]), "a ratio from 0.01:1 to 1000:1");
    }
  }
  return level;
}

void ParseNic(std::string_view text, Described& out) {
  const std::size_t times = text.find('x');
  out.nic_count = 1;
  if (times != std::string_view::npos) {
    out.nic_count = ParseCount(Trim(text.substr(0, times)), "nic", kMostNics);
    text = Trim(text.substr(times + 1));
  }
  out.nic = ParseRate(text, "nic");
}

void ParseItem(std::string_view item, Described& out) {
  const std::size_t space = item.find(' ');
  const std::string_view key = item.substr(0, space);
  const std::string_view value =
      space == std::string_view::npos ? std::string_view() : Trim(item.substr(space));
  const bool is_scale_up = key == "nvlink" || key == "xgmi";
  if (is_scale_up && value == "none") {
    out.has_nvlink = false;
  } else if (is_scale_up) {
    out.nvlink = ParseRate(value, key);
  } else if (key == "nic") {
    ParseNic(value, out);
  } else if (key == "pcie") {
    out.pcie = ParseRate(value, key);
  } else if (key == "host") {
    out.host = ParseBytes(value, Where(key));
  } else if (key == "pinned") {
    out.pinned = ParseBytes(value, Where(key));
  } else if (key == "network") {
    out.network = value;
  } else if (key == "nodes") {
    out.nodes = ParseCount(value, key, 10'000'000);
  } else if (key == "level") {
    out.fabric.push_back(ParseLevel(value));
  } else {
    const std::vector<std::string> keys = {"nvlink", "xgmi",    "nic",   "pcie", "host",
                                           "pinned", "network", "nodes", "level"};
    throw InputError(std::string(kWhere), '"' + std::string(item) + '"',
                     "nvlink, xgmi, nic, pcie, host, pinned, network, nodes or level",
                     DidYouMean(key, keys));
  }
}

Described ParseDescription(const std::string& text) {
  Described out;
  const std::vector<std::string_view> items = Split(text, ',');
  const std::vector<std::string_view> gpu = Split(items[0], ' ');
  if (gpu.empty() || gpu.size() > 2 || (gpu.size() == 2 && !gpu[1].starts_with('x'))) {
    throw InputError(std::string(kWhere), '"' + std::string(items[0]) + '"',
                     "a GPU and a count such as \"h100-80 x8\"");
  }
  out.gpu = FindGpu(gpu[0], kWhere);
  if (gpu.size() == 2) {
    out.gpu_count = ParseCount(gpu[1].substr(1), "GPU count", kMostGpus);
  }
  std::vector<std::string> seen;
  for (std::size_t i = 1; i < items.size(); ++i) {
    std::string key(items[i].substr(0, items[i].find(' ')));
    key = key == "xgmi" ? "nvlink" : key;  // two words for one link
    if (key != "level" && IsIn(seen, key)) {
      throw InputError(std::string(kWhere), "\"" + key + "\" a second time", "it once");
    }
    seen.push_back(key);
    ParseItem(items[i], out);
  }
  return out;
}

std::int64_t SwitchCount(const Described& given) {
  const std::int64_t less = std::min(given.gpu_count, given.nic_count);
  const std::int64_t more = std::max(given.gpu_count, given.nic_count);
  return less > 0 && more % less == 0 ? less : 0;
}

// Without a scale-up link more than four GPUs stand on two sockets, half of them on each, as in the
// catalog's pcie-8x4090: what crosses them shares the link in between.
constexpr std::int64_t kMostGpusOfASocket = 4;
constexpr BytesPerSecond kBetweenSockets{16e9};  // NVIDIA/nccl 2.30.7 src/graph/topo.h: AMD

BytesPerSecond ScaleUpOf(const Described& given) {
  if (!given.has_nvlink || given.gpu_count == 1) {
    return {};
  }
  return given.nvlink.value == 0 && given.gpu.scale_up ? given.gpu.scale_up->value : given.nvlink;
}

bool HasTwoSockets(const Described& given) {
  const std::int64_t switches = SwitchCount(given);
  return ScaleUpOf(given).value <= 0 && given.gpu_count > kMostGpusOfASocket &&
         given.gpu_count % 2 == 0 && (switches <= 1 || switches % 2 == 0);
}

// GPUs and NICs under one CPU with one memory, or two of each: a description says nothing about
// sockets.
NodeType BuildNode(const Described& given, const Origin& origin) {
  const Path where{std::string(kWhere)};
  NodeBuilder builder;
  const auto component = [&](const char* name, ComponentKind kind) {
    return Component{name, kind, Bytes(0), BytesPerSecond(0), origin};
  };
  const auto link = [&](LinkKind kind, BytesPerSecond rate) {
    return Link{0, 0, kind, rate, rate, Seconds(0), origin};
  };
  const BytesPerSecond pcie = given.pcie.value > 0 ? given.pcie : given.gpu.host_link.value;
  builder.AddGroup(component("gpu", ComponentKind::kGpu), given.gpu_count, where);
  const std::int64_t sockets = HasTwoSockets(given) ? 2 : 1;
  builder.AddGroup(component("cpu", ComponentKind::kCpu), sockets, where);
  Component memory = component("memory", ComponentKind::kHostMemory);
  memory.capacity = Bytes(given.host.value / sockets);
  builder.AddGroup(memory, sockets, where);
  if (sockets > 1) {
    builder.Connect("cpu", "cpu", LinkPattern::kAll, link(LinkKind::kCpu, kBetweenSockets), where);
  }
  // A NIC is near to its share of the GPUs: they hang on one switch, whose link to the CPU is wide
  // enough for all of them. Without NICs or when the counts do not divide, everything hangs on the
  // CPU.
  const std::int64_t switches = SwitchCount(given) % sockets == 0 ? SwitchCount(given) : 0;
  const char* host_side = "cpu";
  if (switches > 0) {
    host_side = "switch";
    builder.AddGroup(component("switch", ComponentKind::kPcieSwitch), switches, where);
    builder.Connect(
        "switch", "cpu", LinkPattern::kSpread,
        link(LinkKind::kPcie, pcie * static_cast<double>(CeilDiv(given.gpu_count, switches))),
        where);
  }
  builder.Connect("gpu", host_side, LinkPattern::kSpread, link(LinkKind::kPcie, pcie), where);
  // Host memory must not limit copies of which the description says nothing.
  builder.Connect("cpu", "memory", LinkPattern::kSpread,
                  link(LinkKind::kMemory, pcie * static_cast<double>(given.gpu_count)), where);
  const BytesPerSecond nvlink = ScaleUpOf(given);
  if (nvlink.value > 0) {
    builder.AddGroup(component("nvswitch", ComponentKind::kNvSwitch), 1, where);
    builder.Connect("gpu", "nvswitch", LinkPattern::kSpread, link(LinkKind::kNvlink, nvlink),
                    where);
  }
  if (given.nic_count > 0) {
    Component nic = component("nic", ComponentKind::kNic);
    nic.bandwidth = given.nic;
    builder.AddGroup(nic, given.nic_count, where);
    const bool is_on_one = sockets > 1 && switches == 0 && given.nic_count % sockets != 0;
    builder.Connect("nic", is_on_one ? "cpu0" : host_side, LinkPattern::kSpread,
                    link(LinkKind::kPcie, given.nic), where);
  }
  NodeType node = builder.Finish(where);
  if (given.pinned.value > 0) {
    if (given.pinned > given.host) {
      throw InputError(Where("pinned"), Format(given.pinned),
                       "at most the host memory, " + Format(given.host));
    }
    node.pinned_limit = given.pinned;
  }
  return node;
}

}  // namespace

Cluster ParseInlineCluster(const std::string& text) {
  const Described given = ParseDescription(text);
  const Origin origin{NumberKind::kAssumed, "the user's description: " + text, ""};
  Cluster cluster;
  cluster.name = "inline";
  cluster.spec = text;
  cluster.description = text;
  cluster.gpu = given.gpu;
  cluster.node = BuildNode(given, origin);
  cluster.network = given.network;
  cluster.fabric = given.fabric;
  for (FabricLevel& level : cluster.fabric) {
    level.origin = origin;
  }
  cluster.node_count = given.nodes;
  cluster.gpus_per_node = given.gpu_count;
  CheckCluster(cluster, std::string(kWhere));
  return cluster;
}

}  // namespace shardwright::internal
