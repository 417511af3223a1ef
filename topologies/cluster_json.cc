// Cluster files. The format is described in docs/clusters.md.

#include "topologies/internal/cluster_json.h"

#include <array>
#include <cstddef>
#include <optional>
#include <set>
#include <string_view>

#include <nlohmann/json.hpp>

#include "core/cores.h"
#include "core/error.h"
#include "core/ranges.h"
#include "topologies/internal/node_builder.h"
#include "topologies/internal/number_json.h"

namespace shardwright {
namespace internal {
namespace {

constexpr std::int64_t kMostNodes = 10'000'000;

constexpr std::array<std::string_view, 6> kComponents = {"gpu", "nvswitch",    "pcie_switch",
                                                         "cpu", "host_memory", "nic"};
constexpr std::array<std::string_view, 4> kLinks = {"nvlink", "pcie", "cpu", "memory"};

BytesPerSecond ReadRate(const JsonValue& value) {
  const BytesPerSecond rate = value.AsBytesPerSecond();
  if (rate.value <= 0) {
    throw value.Error("a rate above 0");
  }
  return rate;
}

Origin RequireOrigin(const JsonValue& object, const std::optional<Origin>& outer) {
  const std::optional<Origin> origin = ReadOrigin(object, outer);
  if (!origin) {
    throw InputError(object.path().str(), "no origin",
                     "\"kind\", \"source\" and \"date\" here or around");
  }
  return *origin;
}

void ReadComponent(const JsonValue& value, const std::optional<Origin>& outer,
                   NodeBuilder& builder) {
  value.AllowOnly({"name", "type", "count", "capacity", "bandwidth", "kind", "source", "date"});
  Component component;
  component.name = value.At("name").AsString();
  component.kind = static_cast<ComponentKind>(value.At("type").AsChoice(kComponents));
  component.origin = RequireOrigin(value, outer);
  if (component.kind == ComponentKind::kHostMemory) {
    component.capacity = value.At("capacity").AsBytes();
  } else if (const auto capacity = value.Find("capacity")) {
    throw capacity->Error("no capacity, since only host memory has one");
  }
  if (component.kind == ComponentKind::kNic) {
    component.bandwidth = ReadRate(value.At("bandwidth"));
  } else if (const auto bandwidth = value.Find("bandwidth")) {
    throw bandwidth->Error("no bandwidth, since only a NIC has one; links carry the others");
  }
  const auto count = value.Find("count");
  builder.AddGroup(component, count ? count->AsInt(1, 100000) : 1, value.path());
}

void ReadLink(const JsonValue& value, const std::optional<Origin>& outer, NodeBuilder& builder) {
  value.AllowOnly({"from", "to", "type", "pattern", "bandwidth", "backward", "latency", "kind",
                   "source", "date"});
  Link link;
  link.kind = static_cast<LinkKind>(value.At("type").AsChoice(kLinks));
  link.forward = ReadRate(value.At("bandwidth"));
  const auto backward = value.Find("backward");
  link.backward = backward ? ReadRate(*backward) : link.forward;
  if (const auto latency = value.Find("latency")) {
    link.latency = latency->AsSeconds();
  }
  link.origin = RequireOrigin(value, outer);
  LinkPattern pattern = LinkPattern::kSpread;
  if (const auto given = value.Find("pattern")) {
    pattern = static_cast<LinkPattern>(given->AsChoice({"spread", "all"}));
  }
  builder.Connect(value.At("from").AsString(), value.At("to").AsString(), pattern, link,
                  value.path());
}

NodeType ReadNode(const JsonValue& value) {
  value.AllowOnly({"components", "links", "pinned_limit", "kind", "source", "date"});
  const std::optional<Origin> origin = ReadOrigin(value, std::nullopt);
  NodeBuilder builder;
  const JsonValue components = value.At("components");
  for (std::size_t i = 0; i < components.size(); ++i) {
    ReadComponent(components[i], origin, builder);
  }
  if (const auto links = value.Find("links")) {
    for (std::size_t i = 0; i < links->size(); ++i) {
      ReadLink((*links)[i], origin, builder);
    }
  }
  NodeType node = builder.Finish(value.path());
  if (const auto limit = value.Find("pinned_limit")) {
    node.pinned_limit = limit->AsBytes();
    if (node.pinned_limit > node.host_memory) {
      throw limit->Error("at most the host memory, " + Format(node.host_memory));
    }
  }
  return node;
}

FabricLevel ReadFabricLevel(const JsonValue& value) {
  value.AllowOnly({"name", "group_nodes", "oversubscription", "latency", "kind", "source", "date"});
  FabricLevel level;
  level.name = value.At("name").AsString();
  if (const auto nodes = value.Find("group_nodes")) {
    level.group_nodes = nodes->AsInt(1, kMostNodes);
  }
  if (const auto ratio = value.Find("oversubscription")) {
    // Below 1 the uplinks are wider than what hangs on them, as in Meta's leaf tier.
    level.oversubscription = ratio->AsDouble();
    if (!(level.oversubscription >= 0.01 && level.oversubscription <= 1000)) {
      throw ratio->Error("a ratio from 0.01 to 1000");
    }
  }
  if (const auto latency = value.Find("latency")) {
    level.latency = latency->AsSeconds();
  }
  level.origin = RequireOrigin(value, std::nullopt);
  return level;
}

OrderedJson FabricJson(const FabricLevel& level) {
  OrderedJson object = OrderedJson::object();
  object["name"] = level.name;
  if (level.group_nodes > 0) {
    object["group_nodes"] = level.group_nodes;
  }
  object["oversubscription"] = level.oversubscription;
  object["latency"] = FormatExact(level.latency);
  WriteOrigin(object, level.origin);
  return object;
}

OrderedJson GpuJson(const GpuSpec& gpu) {
  OrderedJson object = OrderedJson::object();
  object["name"] = gpu.name;
  object["full_name"] = gpu.full_name;
  object["vendor"] = gpu.vendor;
  object["architecture"] = gpu.architecture;
  object["memory"] = NumberJson(gpu.memory);
  object["usable_memory"] = NumberJson(gpu.usable_memory);
  object["memory_bandwidth"] = NumberJson(gpu.memory_bandwidth);
  object["sm_count"] = NumberJson(gpu.sm_count);
  object["l2"] = NumberJson(gpu.l2);
  OrderedJson peaks = OrderedJson::object();
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (gpu.peak_flops[i]) {
      peaks[MathTypeName(static_cast<MathType>(i))] = NumberJson(*gpu.peak_flops[i]);
    }
  }
  object["peak_flops"] = peaks;
  if (gpu.scale_up) {
    object["scale_up"] = NumberJson(*gpu.scale_up);
  }
  object["host_link"] = NumberJson(gpu.host_link);
  return object;
}

OrderedJson NodeJson(const NodeType& node) {
  OrderedJson components = OrderedJson::array();
  for (const Component& component : node.components) {
    OrderedJson object = OrderedJson::object();
    object["name"] = component.name;
    object["type"] = kComponents[static_cast<std::size_t>(component.kind)];
    if (component.kind == ComponentKind::kHostMemory) {
      object["capacity"] = FormatExact(component.capacity);
    }
    if (component.kind == ComponentKind::kNic) {
      object["bandwidth"] = FormatExact(component.bandwidth);
    }
    WriteOrigin(object, component.origin);
    components.push_back(object);
  }
  OrderedJson links = OrderedJson::array();
  for (const Link& link : node.links) {
    OrderedJson object = OrderedJson::object();
    object["from"] = node.components[static_cast<std::size_t>(link.from)].name;
    object["to"] = node.components[static_cast<std::size_t>(link.to)].name;
    object["type"] = kLinks[static_cast<std::size_t>(link.kind)];
    object["bandwidth"] = FormatExact(link.forward);
    object["backward"] = FormatExact(link.backward);
    object["latency"] = FormatExact(link.latency);
    WriteOrigin(object, link.origin);
    links.push_back(object);
  }
  OrderedJson object = OrderedJson::object();
  object["components"] = components;
  object["links"] = links;
  object["pinned_limit"] = FormatExact(node.pinned_limit);
  return object;
}

constexpr const char* kThisMachine = "this machine";

void ReadAllCores(const JsonValue& root, Cluster& cluster) {
  if (const auto cores = root.Find("node_cores")) {
    cluster.node_cores = ReadCores(*cores);
  }
  const auto machine = root.Find("machine_cores");
  if (!machine) {
    return;
  }
  if (cluster.node_cores > 0) {
    throw machine->Error("one of node_cores and machine_cores");
  }
  if (machine->IsString()) {
    if (machine->AsString() != kThisMachine) {
      throw machine->Error("a number of cores or \"this machine\"");
    }
    cluster.machine_cores = AvailableCores();
    return;
  }
  cluster.machine_cores = ReadCores(*machine);
}

void ReadRankThreads(const JsonValue& root, Cluster& cluster) {
  const auto threads = root.Find("rank_threads");
  if (!threads) {
    return;
  }
  if (cluster.SharedCores() == 0) {
    throw threads->Error("node_cores or machine_cores beside it");
  }
  cluster.rank_threads = ReadThreads(*threads);
}

}  // namespace

void CheckFormat(const JsonValue& root, const std::string& format) {
  const JsonValue given = root.At("format");
  if (!given.IsString() || given.AsString() != format) {
    throw given.Error('"' + format + '"');
  }
  const JsonValue version = root.At("version");
  if (version.AsInt(1) != 1) {
    throw version.Error("version 1, the only one this program knows");
  }
}

// A data sheet's numbers are asked for at once, and not one by one.
void RequireAll(const JsonValue& value, std::initializer_list<std::string_view> keys) {
  std::string missing;
  std::size_t count = 0;
  for (const std::string_view key : keys) {
    if (!value.Find(key)) {
      missing += (missing.empty() ? "\"" : ", \"") + std::string(key) + '"';
      ++count;
    }
  }
  if (count > 1) {
    throw InputError(value.path().str(), "no keys " + missing, "all of them");
  }
}

GpuSpec ReadGpu(const JsonValue& value) {
  value.AllowOnly({"name", "full_name", "vendor", "architecture", "memory", "usable_memory",
                   "memory_bandwidth", "sm_count", "l2", "peak_flops", "scale_up", "host_link",
                   "kind", "source", "date"});
  RequireAll(value, {"name", "vendor", "architecture", "memory", "usable_memory",
                     "memory_bandwidth", "sm_count", "l2", "peak_flops", "host_link"});
  const std::optional<Origin> origin = ReadOrigin(value, std::nullopt);
  GpuSpec gpu;
  gpu.name = value.At("name").AsString();
  const auto full_name = value.Find("full_name");
  gpu.full_name = full_name ? full_name->AsString() : gpu.name;
  gpu.vendor = value.At("vendor").AsString();
  gpu.architecture = value.At("architecture").AsString();
  gpu.memory = ReadNumber<Bytes>(value.At("memory"), origin);
  gpu.usable_memory = ReadNumber<Bytes>(value.At("usable_memory"), origin);
  gpu.memory_bandwidth = ReadNumber<BytesPerSecond>(value.At("memory_bandwidth"), origin);
  gpu.sm_count = ReadNumber<std::int64_t>(value.At("sm_count"), origin);
  gpu.l2 = ReadNumber<Bytes>(value.At("l2"), origin);
  const JsonValue peaks = value.At("peak_flops");
  peaks.AllowOnly({"fp32", "tf32", "fp16", "bf16", "fp8"});
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    if (const auto peak = peaks.Find(MathTypeName(static_cast<MathType>(i)))) {
      gpu.peak_flops[i] = ReadNumber<FlopsPerSecond>(*peak, origin);
      if (gpu.peak_flops[i]->value.value <= 0) {
        throw peak->Error("a rate above 0");
      }
    }
  }
  if (const auto scale_up = value.Find("scale_up")) {
    gpu.scale_up = ReadNumber<BytesPerSecond>(*scale_up, origin);
  }
  gpu.host_link = ReadNumber<BytesPerSecond>(value.At("host_link"), origin);
  if (gpu.memory_bandwidth.value.value <= 0) {
    throw value.At("memory_bandwidth").Error("a rate above 0");
  }
  if (gpu.usable_memory.value.value <= 0) {
    throw value.At("usable_memory").Error("a size above 0");
  }
  if (gpu.host_link.value.value <= 0) {
    throw value.At("host_link").Error("a rate above 0");
  }
  if (gpu.sm_count.value < 1) {
    throw value.At("sm_count").Error("at least 1");
  }
  return gpu;
}

std::vector<GpuSpec> ParseGpuList(std::string_view text, const std::string& file) {
  const JsonValue root = JsonValue::Parse(text, file);
  root.AllowOnly({"format", "version", "gpus"});
  CheckFormat(root, "shardwright-gpus");
  std::vector<GpuSpec> gpus;
  std::set<std::string> names;
  const JsonValue list = root.At("gpus");
  for (std::size_t i = 0; i < list.size(); ++i) {
    gpus.push_back(ReadGpu(list[i]));
    if (!names.insert(gpus.back().name).second) {
      throw list[i].At("name").Error("each name once");
    }
  }
  return gpus;
}

void CheckCluster(const Cluster& cluster, const std::string& where) {
  const auto gpus = CountOf(cluster.node.components, ComponentKind::kGpu, &Component::kind);
  if (cluster.gpus_per_node < 1 || cluster.gpus_per_node > gpus) {
    const bool are_nodes = cluster.gpus_per_node > 0 && cluster.gpus_per_node % gpus == 0;
    throw InputError(
        where, std::to_string(cluster.gpus_per_node) + " GPUs of each node",
        "1 to " + std::to_string(gpus),
        are_nodes ? "so many GPUs are --nodes " + std::to_string(cluster.gpus_per_node / gpus)
                  : "");
  }
  if (cluster.node_count < 1 || cluster.node_count > kMostNodes) {
    throw InputError(where, std::to_string(cluster.node_count) + " nodes",
                     "1 to " + std::to_string(kMostNodes));
  }
  const bool has_nic = IsIn(cluster.node.components, ComponentKind::kNic, &Component::kind);
  if (cluster.node_count > 1 && !has_nic) {
    throw InputError(where, std::to_string(cluster.node_count) + " nodes",
                     "1 node, since its nodes have no NIC",
                     "a description has them, such as \"8xH100, nic 8x400 Gbit/s, nodes 2\"");
  }
  std::int64_t inner = 0;
  for (const FabricLevel& level : cluster.fabric) {
    if (inner < 0 || (level.group_nodes > 0 && level.group_nodes <= inner)) {
      throw InputError(where + ": fabric", "the level \"" + level.name + "\" inside an inner one",
                       "levels with growing group_nodes, all nodes last");
    }
    inner = level.group_nodes > 0 ? level.group_nodes : -1;
  }
}

}  // namespace internal

double ReadCores(const JsonValue& value) {
  constexpr double kMostCores = 100'000;
  const double cores = value.AsDouble();
  if (!(cores > 0 && cores <= kMostCores)) {
    throw value.Error("above 0, at most 100000");
  }
  return cores;
}

std::int64_t ReadThreads(const JsonValue& value) {
  constexpr std::int64_t kMost = 1024;
  return value.AsInt(1, kMost);
}

Cluster ParseCluster(std::string_view text, const std::string& file) {
  const JsonValue root = JsonValue::Parse(text, file);
  root.AllowOnly({"format", "version", "name", "description", "gpu", "network", "cpu_vendor",
                  "node", "fabric", "nodes", "gpus_per_node", "node_cores", "machine_cores",
                  "rank_threads"});
  internal::CheckFormat(root, "shardwright-cluster");
  Cluster cluster;
  cluster.spec = file;
  cluster.name = root.At("name").AsString();
  if (const auto description = root.Find("description")) {
    cluster.description = description->AsString();
  }
  const JsonValue gpu = root.At("gpu");
  cluster.gpu = gpu.IsObject() ? internal::ReadGpu(gpu) : FindGpu(gpu.AsString(), gpu.path().str());
  cluster.node = internal::ReadNode(root.At("node"));
  if (const auto network = root.Find("network")) {
    cluster.network = network->AsString();
  }
  if (const auto vendor = root.Find("cpu_vendor")) {
    constexpr std::array<std::string_view, 2> kVendors = {"intel", "amd"};
    cluster.cpu_vendor = kVendors.at(vendor->AsChoice(kVendors));
  }
  if (const auto fabric = root.Find("fabric")) {
    for (std::size_t i = 0; i < fabric->size(); ++i) {
      cluster.fabric.push_back(internal::ReadFabricLevel((*fabric)[i]));
    }
  }
  if (const auto nodes = root.Find("nodes")) {
    cluster.node_count = nodes->AsInt(1, internal::kMostNodes);
  }
  const auto used = root.Find("gpus_per_node");
  cluster.gpus_per_node =
      used ? used->AsInt(1, 100000)
           : CountOf(cluster.node.components, ComponentKind::kGpu, &Component::kind);
  internal::ReadAllCores(root, cluster);
  internal::ReadRankThreads(root, cluster);
  internal::CheckCluster(cluster, file);
  return cluster;
}

std::string ClusterJson(const Cluster& cluster) {
  internal::OrderedJson root = internal::OrderedJson::object();
  root["format"] = "shardwright-cluster";
  root["version"] = 1;
  root["name"] = cluster.name;
  root["description"] = cluster.description;
  root["gpu"] = internal::GpuJson(cluster.gpu);
  root["network"] = cluster.network;
  if (!cluster.cpu_vendor.empty()) {
    root["cpu_vendor"] = cluster.cpu_vendor;
  }
  root["node"] = internal::NodeJson(cluster.node);
  internal::OrderedJson fabric = internal::OrderedJson::array();
  for (const FabricLevel& level : cluster.fabric) {
    fabric.push_back(internal::FabricJson(level));
  }
  root["fabric"] = fabric;
  root["nodes"] = cluster.node_count;
  root["gpus_per_node"] = cluster.gpus_per_node;
  if (cluster.node_cores > 0) {
    root["node_cores"] = cluster.node_cores;
  }
  if (cluster.machine_cores > 0) {
    root["machine_cores"] = cluster.machine_cores;
  }
  if (cluster.rank_threads > 0) {
    root["rank_threads"] = cluster.rank_threads;
  }
  return internal::PrettyJson(root);
}

}  // namespace shardwright
