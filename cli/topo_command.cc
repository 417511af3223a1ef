#include <array>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/probe.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "topologies/import_topology.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

TopologyOptions ReadOptions(const Arguments& arguments) {
  TopologyOptions options;
  arguments.SetText("--gpu", options.gpu);
  arguments.Set("--nic", options.nic, ReadRate);
  arguments.Set("--host", options.host_memory, ReadBytes);
  arguments.SetText("--network", options.network);
  constexpr std::int64_t kMostNodes = 10'000'000;
  arguments.SetCount("--nodes", kMostNodes, options.nodes);
  arguments.SetText("--name", options.name);
  return options;
}

std::string ReportText(const ImportedTopology& topology, const std::string& output) {
  const Cluster& cluster = topology.cluster;
  const NodeType& node = cluster.node;
  std::array<std::int64_t, 6> counts{};
  for (const Component& component : node.components) {
    ++counts[static_cast<std::size_t>(component.kind)];
  }
  const auto count = [&](ComponentKind kind) {
    return std::to_string(counts[static_cast<std::size_t>(kind)]);
  };
  std::string text = std::string(NameOf(topology.format)) + ": " + count(ComponentKind::kGpu) +
                     " x " + PrintableLine(cluster.gpu.name) + ", " + count(ComponentKind::kNic) +
                     " NICs, " + count(ComponentKind::kCpu) + " CPUs, " +
                     count(ComponentKind::kPcieSwitch) + " PCIe switches\n";
  if (cluster.gpus_per_node > 1) {
    Cluster one = cluster;
    one.node_count = 1;
    text += "ring inside a node: " + Format(FindRing(one, {one.gpus_per_node, 1}).Rate()) +
            " per GPU and direction\n";
  }
  for (const std::string& note : topology.notes) {
    text += "note: " + note + "\n";
  }
  return output.empty() ? text : text + "Wrote " + output + "\n";
}

std::string ReportJson(const ImportedTopology& topology) {
  Json json = ReportHead("shardwright-topology");
  json["format"] = NameOf(topology.format);
  json["notes"] = topology.notes;
  json["cluster"] = Json::parse(ClusterJson(topology.cluster));
  return json.dump(2) + "\n";
}

int RunTopoImport(const Arguments& arguments) {
  const std::string file = arguments.Get("FILE").text;
  if (file.empty()) {
    throw UsageError("topo import needs a file, or - for standard input");
  }
  const TopologyOptions options = ReadOptions(arguments);
  constexpr std::int64_t kLargest = std::int64_t{16} << 20;
  const std::string text = file == "-" ? arguments.streams.read() : ReadTextFile(file, kLargest);
  const ImportedTopology topology =
      ImportTopology(text, file == "-" ? "standard input" : file, options);
  const std::string output = arguments.Get("--output").text;
  if (!output.empty()) {
    WriteFileAtomically(output, ClusterJson(topology.cluster));
  }
  if (output != "-") {
    arguments.Print(arguments.IsJson() ? ReportJson(topology) : ReportText(topology, output));
  }
  return kExitOk;
}

}  // namespace

int TopoCommand(const Arguments& arguments) {
  static constexpr std::array<std::string_view, 2> kActions = {"import", "probe"};
  if (ReadChoice({"topo", arguments.Get("ACTION").text}, kActions) == 0) {
    return RunTopoImport(arguments);
  }
  if (arguments.Get("FILE").is_given()) {
    throw UsageError("topo probe takes no file");
  }
  const ProbedMachine machine = ProbeMachine(ReadOptions(arguments));
  const std::string output = arguments.Get("--output").text;
  if (!output.empty() && !machine.topology) {
    throw EnvironmentError("topo probe: no GPU was seen, so there is no cluster to write");
  }
  if (!output.empty()) {
    WriteFileAtomically(output, ClusterJson(machine.topology->cluster));
  }
  if (arguments.IsJson()) {
    Json json = ReportHead("shardwright-probe");
    json["seen"] = machine.seen;
    json["not_seen"] = machine.not_seen;
    json["cluster"] =
        machine.topology ? Json::parse(ClusterJson(machine.topology->cluster)) : Json();
    arguments.Print(json.dump(2) + "\n");
    return kExitOk;
  }
  std::string text;
  for (const std::string& line : machine.seen) {
    text += "seen: " + line + "\n";
  }
  for (const std::string& line : machine.not_seen) {
    text += "not seen: " + line + "\n";
  }
  text += machine.topology ? ReportText(*machine.topology, output) : "";
  arguments.Print(text);
  return kExitOk;
}

}  // namespace shardwright
