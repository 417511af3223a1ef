#include "topologies/cluster.h"

#include <array>
#include <cstddef>
#include <utility>

#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/cluster_catalog.h"
#include "topologies/gpu_catalog.h"
#include "topologies/gpu_names.h"
#include "topologies/internal/cluster_json.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

std::vector<std::string> GpuNames() {
  return Mapped<std::string>(GpuCatalog(), &GpuSpec::name);
}

// "64xH100" is eight nodes of eight, unless `rest` says how the node is joined.
std::int64_t NodesOf(const std::string& spec, const GpuSpec& gpu, std::int64_t count,
                     const std::string& rest) {
  const std::int64_t most = MostOfANode(gpu);
  if (most == 0 || count <= most || rest.find("nvlink") != rest.npos ||
      rest.find("xgmi") != rest.npos) {
    return 0;
  }
  if (count % most != 0) {
    throw InputError("cluster", '"' + spec + '"',
                     "whole nodes: one has at most " + std::to_string(most) + " x " + gpu.name +
                         "; say nodes and GPUs, such as \"3x4x" + gpu.name + "\"");
  }
  return count / most;
}

// What people write in many ways, in one: "8xH100", "h100-80x8", "2x8 H100" (two nodes of eight),
// "64xH100" (eight of them), "2 x DGX-H100". `nodes` is 0 where it says nothing of them.
struct Spelled {
  std::string spec;
  std::int64_t nodes = 0;
};

// A name that stands in `head` as whole words, with nothing but counts and makers around it.
std::optional<GpuName> Around(const std::string& head, const std::string& name) {
  const std::size_t at = head.find(name);
  const std::size_t end = at + name.size();
  if (at == head.npos || (at > 0 && head[at - 1] != ' ' && head[at - 1] != 'x') ||
      (end < head.size() && std::string_view(" x:(").find(head[end]) == std::string_view::npos)) {
    return std::nullopt;
  }
  GpuName counts = ReadGpuName(head.substr(0, at) + " " + head.substr(end));
  return counts.is_only_counts ? std::optional(counts) : std::nullopt;
}

// A node of the catalog or of a cloud, and how many.
std::optional<Spelled> SpellNode(const std::string& spec, std::string head, bool is_alone) {
  std::vector<std::pair<std::string, std::string>> nodes = CloudNodes();
  std::replace(head.begin(), head.end(), '_', '-');
  for (auto& [name, node] : nodes) {
    std::replace(name.begin(), name.end(), '_', '-');
  }
  for (const std::string& name : ListClusterNames()) {
    nodes.emplace_back(name, name);
    std::string words = name;
    std::replace(words.begin(), words.end(), '-', ' ');  // "NVIDIA DGX H100"
    nodes.emplace_back(words, name);
  }
  StableSort(nodes, [](const auto& a, const auto& b) {
    return a.first.size() > b.first.size();  // "dgx-a100-40" before "dgx-a100"
  });
  for (const auto& [name, node] : nodes) {
    const std::optional<GpuName> around = Around(head, name);
    if (!around || around->counts.size() > 1) {
      continue;
    }
    if (!is_alone) {
      throw InputError("cluster", '"' + spec + '"',
                       "nothing behind the name of a cluster of the catalog, or a description of "
                       "its own that begins with a GPU");
    }
    return Spelled{node, around->counts.empty() ? 0 : around->counts.front()};
  }
  return std::nullopt;
}

// Of names whose numbers are those of `word` as far as both go: another number is another product.
std::string Hint(std::string_view word, const std::vector<std::string>& names) {
  const std::string low = LowerCase(word);
  for (const std::string& name : names) {
    if (name.starts_with(low + "-")) {
      return "did you mean \"" + name + "\"?";
    }
  }
  return DidYouMeanProduct(low, names);
}

[[noreturn]] void RefuseName(const std::string& spec, const std::string& head,
                             const std::string& why) {
  std::vector<std::string> names = GpuNames();
  const std::vector<std::string> clusters = ListClusterNames();
  names.insert(names.end(), clusters.begin(), clusters.end());
  const std::string hint = Hint(head, names);
  throw InputError("cluster", '"' + spec + '"',
                   "a name from `shardwright list clusters`, a .json file (also with a card of "
                   "your own) or a description such as "
                   "\"h100-80 x8, nvlink 450 GB/s, nic 4x200 Gbit/s\"",
                   hint.empty() || !(why.empty() || why.front() == '"') ? why : hint);
}

Spelled Spell(const std::string& spec) {
  const std::size_t comma = std::min(spec.find(','), spec.size());
  const std::string head = LowerCase(std::string_view(spec).substr(0, comma));
  if (const auto node = SpellNode(spec, head, comma == spec.size())) {
    return *node;
  }
  const GpuName name = ReadGpuName(head);
  const std::vector<std::string> ours = GpuNames();
  const std::string first = spec.substr(0, spec.find(' '));
  const bool is_ours = IsIn(ours, first);
  if (name.gpu.empty() && !name.why.empty() && !is_ours) {  // else the description tells more
    RefuseName(spec, name.key, name.why);
  }
  if (name.gpu.empty() || name.counts.size() > 2) {
    return {spec, 0};
  }
  if (name.counts.empty()) {
    return {name.gpu + spec.substr(comma), 0};
  }
  const std::int64_t nodes =
      name.counts.size() == 2
          ? name.counts.front()
          : NodesOf(spec, FindGpu(name.gpu, "cluster"), name.counts.back(), spec.substr(comma));
  const std::int64_t each =
      name.counts.size() == 2 || nodes == 0 ? name.counts.back() : name.counts.back() / nodes;
  return {name.gpu + " x" + std::to_string(each) + spec.substr(comma), nodes};
}

// "h100-80", "h100-80 x8, ...": a comma, or a known GPU as the first word.
bool IsInline(const std::string& spec) {
  const std::vector<std::string> names = GpuNames();
  return spec.find(',') != std::string::npos || IsIn(names, spec.substr(0, spec.find(' ')));
}

// "MI250X/MI250" is a name.
bool IsPath(const std::string& spec) {
  return spec.ends_with(".json") ||
         (spec.find('/') != std::string::npos && ReadGpuName(spec).gpu.empty());
}

// lspci's maker has a comma of its own.
std::string WithoutMaker(const std::string& spec) {
  constexpr std::string_view kMaker = "advanced micro devices, inc.";
  return LowerCase(spec).starts_with(kMaker) ? spec.substr(kMaker.size()) : spec;
}

Cluster LoadWhole(const std::string& spec) {
  const auto catalog = EmbeddedClusterCatalog();
  const auto entry = FindIn(catalog, spec, &EmbeddedFile::name);
  if (entry != catalog.end()) {
    Cluster cluster = ParseCluster(entry->text, std::string(entry->path));
    cluster.spec = spec;
    return cluster;
  }
  if (IsInline(spec)) {
    return internal::ParseInlineCluster(spec);
  }
  if (IsPath(spec)) {
    return ParseCluster(ReadTextFile(spec), spec);
  }
  RefuseName(spec, spec.substr(0, spec.find(' ')), "");
}

}  // namespace

MathType MathTypeOf(DType dtype) {
  return dtype == DType::kBf16   ? MathType::kBf16
         : dtype == DType::kFp16 ? MathType::kFp16
         : dtype == DType::kFp8  ? MathType::kFp8
                                 : MathType::kFp32;
}

const char* MathTypeName(MathType type) {
  constexpr std::array<const char*, kMathTypeCount> kNames = {"fp32", "tf32", "fp16", "bf16",
                                                              "fp8"};
  return kNames[static_cast<std::size_t>(type)];
}

std::optional<FlopsPerSecond> PeakFlops(const GpuSpec& gpu, MathType type) {
  const auto& peak = gpu.peak_flops[static_cast<std::size_t>(type)];
  return peak ? std::optional(peak->value) : std::nullopt;
}

Cluster LoadCluster(const std::string& spec, std::int64_t nodes, std::int64_t gpus) {
  const Spelled spelled =
      IsPath(spec.substr(0, spec.find(','))) ? Spelled{spec, 0} : Spell(WithoutMaker(spec));
  Cluster cluster = LoadWhole(spelled.spec);
  if (spelled.nodes > 0 && cluster.node_count != 1 && cluster.name == "inline") {
    throw InputError("cluster", '"' + spec + '"', "the number of nodes once");
  }
  cluster.node_count = spelled.nodes == 0 ? cluster.node_count : spelled.nodes;
  cluster.node_count = nodes == 0 ? cluster.node_count : nodes;
  cluster.gpus_per_node = gpus == 0 ? cluster.gpus_per_node : gpus;
  internal::CheckCluster(cluster, "cluster " + cluster.name);
  return cluster;
}

std::vector<ClusterSummary> ListClusters() {
  std::vector<ClusterSummary> summaries;
  for (const EmbeddedFile& file : EmbeddedClusterCatalog()) {
    const Cluster cluster = ParseCluster(file.text, std::string(file.path));
    ClusterSummary summary;
    summary.name = cluster.name;
    summary.description = cluster.description;
    summary.gpu = cluster.gpu.name;
    summary.gpus_per_node = cluster.gpus_per_node;
    summary.cores = cluster.SharedCores();
    Cluster node = cluster;
    node.node_count = 1;
    summary.scale_up = FindRing(node, {node.gpus_per_node, 1}).Rate();
    summary.network_rate = NodeNetworkRate(cluster);
    summaries.push_back(summary);
  }
  SortBy(summaries, &ClusterSummary::name);
  return summaries;
}

std::vector<std::string> ListClusterNames() {
  return NamesOf(EmbeddedClusterCatalog());
}

std::string CoresText(double cores) {
  return Fixed(cores, cores == 1 ? "%g core" : "%g cores");
}

const std::vector<GpuSpec>& GpuCatalog() {
  static const std::vector<GpuSpec> gpus = [] {
    const EmbeddedFile& file = EmbeddedGpuCatalog()[0];
    return internal::ParseGpuList(file.text, std::string(file.path));
  }();
  return gpus;
}

const GpuSpec& FindGpu(std::string_view name, std::string_view where) {
  for (const GpuSpec& gpu : GpuCatalog()) {
    if (gpu.name == name) {
      return gpu;
    }
  }
  throw InputError(where, '"' + std::string(name) + '"', "a GPU of `shardwright list gpus`",
                   Hint(name, GpuNames()));
}

}  // namespace shardwright
