#include "topologies/cluster.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <optional>

#include "core/embedded.h"
#include "core/error.h"
#include "core/json.h"
#include "core/text.h"
#include "topologies/cluster_catalog.h"
#include "topologies/gpu_catalog.h"
#include "topologies/gpu_names.h"
#include "topologies/instance_types.h"
#include "topologies/internal/cluster_json.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

std::vector<std::string> GpuNames() {
  std::vector<std::string> names;
  for (const GpuSpec& gpu : GpuCatalog()) {
    names.push_back(gpu.name);
  }
  return names;
}

std::string WithoutDashes(std::string word) {
  word.erase(std::remove(word.begin(), word.end(), '-'), word.end());
  return word;
}

// The GPU that a word means, whatever its case and dashes; "h200" is the one there is, with its
// memory behind it, "4090" the one of that maker's number, and "a100-80gb" what its maker calls
// a100-80. Empty: none, or several.
std::string GpuNamed(const std::string& word) {
  const std::vector<std::string> names = GpuNames();
  for (const std::string prefix : {"", "rtx"}) {
    for (const std::string& name : names) {
      if (WithoutDashes(name) == prefix + WithoutDashes(word)) {
        return name;
      }
    }
  }
  if (word == "h100") {
    return "h100-80";  // those with 96 GB are few
  }
  std::string found;
  for (const std::string& name : names) {
    const std::size_t size = name.rfind('-');  // where its memory stands, if it does
    const bool is_size = size != name.npos &&
                         name.find_first_not_of("0123456789", size + 1) == name.npos &&
                         WithoutDashes(name.substr(0, size)) == WithoutDashes(word);
    if (is_size && !found.empty()) {
      return "";
    }
    found = is_size ? name : found;
  }
  return found.empty() ? GpuOfProduct(word) : found;
}

bool IsInCatalog(const std::string& name) {
  const auto catalog = EmbeddedClusterCatalog();
  return std::any_of(catalog.begin(), catalog.end(),
                     [&](const EmbeddedFile& file) { return file.name == name; });
}

// "a100" is several GPUs, and which it is decides what fits.
void RefuseManyOfAName(const std::string& spec, const std::string& name) {
  std::vector<std::string> found;
  for (const std::string& gpu : GpuNames()) {
    if (gpu.starts_with(name + "-")) {
      found.push_back(gpu);
    }
  }
  if (found.size() < 2) {
    return;
  }
  std::string expected = "the GPU's full name: " + found.front();
  for (std::size_t i = 1; i < found.size(); ++i) {
    expected += (i + 1 < found.size() ? ", " : " or ") + found[i];
  }
  throw InputError("cluster", '"' + spec + '"', expected);
}

// The most GPUs that a server joins by NVLink or xGMI; 0: the GPU has neither.
std::int64_t MostOfANode(const GpuSpec& gpu) {
  if (!gpu.scale_up) {
    return 0;
  }
  if (gpu.name.starts_with("gb") || gpu.name.starts_with("gh")) {
    return gpu.name.starts_with("gb") ? 72 : 32;  // NVL72, NVL32
  }
  // NVIDIA's DGX-2 and Google's a2-megagpu-16g.
  return gpu.architecture == "volta" || gpu.name == "a100-40" ? 16 : 8;
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

std::string_view Trimmed(std::string_view text) {
  const std::size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return text.substr(begin, text.find_last_not_of(' ') + 1 - begin);
}

// A number of one to seven digits; nothing for other texts.
std::optional<std::int64_t> CountIn(std::string_view text) {
  return text.size() > 7 ? std::nullopt : IntegerIn(text);
}

// Takes the count of "h100 x 8" off its end.
std::optional<std::int64_t> TakeCountBehind(std::string_view& text) {
  const std::size_t letter = text.find_last_not_of("0123456789 ");
  if (letter == text.npos || text[letter] != 'x') {
    return std::nullopt;
  }
  const std::optional<std::int64_t> count = CountIn(Trimmed(text.substr(letter + 1)));
  text = count ? Trimmed(text.substr(0, letter)) : text;
  return count;
}

// Takes the count of "8x h100" and, where `needs_x` is false, of "8 h100" off its begin.
std::optional<std::int64_t> TakeCountBefore(std::string_view& text, bool needs_x) {
  const std::size_t end = text.find_first_not_of("0123456789");
  const std::optional<std::int64_t> count = CountIn(text.substr(0, end));
  std::string_view rest = count && end != text.npos ? Trimmed(text.substr(end)) : text;
  const bool has_x = rest.starts_with('x');
  if (!count || rest.size() == text.size() || (needs_x && !has_x)) {
    return std::nullopt;
  }
  text = has_x ? Trimmed(rest.substr(1)) : rest;
  return count;
}

// "h100", "rtx 4090" or "4090": up to four words, the first begins with a letter.
bool IsGpuWord(std::string_view text) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyz0123456789- ";
  const bool is_name = !text.empty() && kAllowed.find(text[0]) < 26 && !text.ends_with(' ') &&
                       text.find_first_not_of(kAllowed) == text.npos &&
                       text.find("  ") == text.npos &&
                       std::count(text.begin(), text.end(), ' ') <= 3;
  return is_name || (text.size() == 4 && CountIn(text));
}

// "4x p5.48xlarge" and "8xRTX5090" with the catalogs' names.
std::string InOurNames(std::string head) {
  for (const InstanceType& type : InstanceTypes()) {
    if (const std::size_t at = head.find(type.name); at != head.npos) {
      // "g5.48xlarge x2": a description has its count in front.
      std::string_view behind = std::string_view(head).substr(at + type.name.size());
      const std::optional<std::int64_t> count = TakeCountBehind(behind);
      if (at == 0 && type.node.find(',') != type.node.npos && count && behind.empty()) {
        return std::to_string(*count) + "x " + std::string(type.node);
      }
      return head.replace(at, type.name.size(), type.node);
    }
  }
  for (std::size_t at = 0; (at = head.find("rtx", at)) != head.npos;) {
    at += 3;
    const std::size_t next = at + (head.substr(at, 1) == " " ? 1 : 0);
    if (next < head.size() && std::isalnum(static_cast<unsigned char>(head[next])) != 0) {
      head.replace(at, next - at, "-");
    }
  }
  return head;
}

// What people write in many ways, in one: "8xH100", "h100-80x8", "2x8 H100" (two nodes of eight),
// "64xH100" (eight of them), "2 x DGX-H100". `nodes` is 0 where it says nothing of them.
struct Spelled {
  std::string spec;
  std::int64_t nodes = 0;
};
Spelled Spell(const std::string& spec) {
  const std::size_t comma = std::min(spec.find(','), spec.size());
  const std::string head = InOurNames(LowerCase(std::string_view(spec).substr(0, comma)));
  const auto alone = [&] {  // a node of the catalog is described already
    if (comma < spec.size()) {
      throw InputError("cluster", '"' + spec + '"',
                       "nothing behind the name of a cluster of the catalog, or a description of "
                       "its own that begins with a GPU");
    }
  };
  if (IsInCatalog(head)) {
    alone();
    return {head, 0};
  }
  if (head.find(',') != head.npos) {  // a cloud's node, which is described now
    alone();
    return Spell(head);
  }
  // A count or two, a name, and a count behind it.
  std::vector<std::int64_t> counts;
  std::string_view text = Trimmed(head);
  const std::optional<std::int64_t> behind = TakeCountBehind(text);
  for (const bool needs_x : {true, false}) {
    if (const auto count = IsGpuWord(text) ? std::nullopt : TakeCountBefore(text, needs_x)) {
      counts.push_back(*count);
    }
  }
  if (behind) {
    counts.push_back(*behind);
  }
  if (!IsGpuWord(text)) {
    const std::string product = GpuOfProduct(head);  // "NVIDIA H100 80GB HBM3"
    return {product.empty() ? spec : product + spec.substr(comma), 0};
  }
  std::string name(text);
  std::replace(name.begin(), name.end(), ' ', '-');  // "rtx 4090", "h100 sxm"
  const std::string gpu = GpuNamed(name);
  if (gpu.empty() && !IsInCatalog(name)) {
    RefuseManyOfAName(spec, name);
  }
  if (counts.size() > 2 || (gpu.empty() && (!IsInCatalog(name) || counts.size() > 1))) {
    return {spec, 0};
  }
  if (gpu.empty()) {
    alone();
    return {name, counts.empty() ? 0 : counts.front()};
  }
  if (counts.empty()) {
    return {gpu + spec.substr(comma), 0};
  }
  const std::int64_t nodes = counts.size() == 2 ? counts.front()
                                                : NodesOf(spec, FindGpu(gpu, "cluster"),
                                                          counts.back(), spec.substr(comma));
  const std::int64_t each =
      counts.size() == 2 || nodes == 0 ? counts.back() : counts.back() / nodes;
  return {gpu + " x" + std::to_string(each) + spec.substr(comma), nodes};
}

// "h100" is three edits from "h100-80" but one from "a100": a longer name beats a near one.
std::string Hint(std::string_view word, const std::vector<std::string>& names) {
  for (const std::string_view other : {"tpu", "trn", "trainium", "inf2", "gaudi"}) {
    if (LowerCase(word).find(other) != std::string::npos) {
      return "only GPUs of NVIDIA and AMD are modelled";
    }
  }
  for (const std::string& name : names) {
    if (name.starts_with(LowerCase(word) + "-")) {
      return "did you mean \"" + name + "\"?";
    }
  }
  return DidYouMean(LowerCase(word), names);
}

// "h100-80", "h100-80 x8, ...": a comma, or a known GPU as the first word.
bool IsInline(const std::string& spec) {
  const std::vector<std::string> names = GpuNames();
  return spec.find(',') != std::string::npos ||
         std::find(names.begin(), names.end(), spec.substr(0, spec.find(' '))) != names.end();
}

bool IsPath(const std::string& spec) {
  return spec.ends_with(".json") || spec.find('/') != std::string::npos;
}

Cluster LoadWhole(const std::string& spec) {
  const auto catalog = EmbeddedClusterCatalog();
  const auto entry = std::find_if(catalog.begin(), catalog.end(),
                                  [&](const EmbeddedFile& file) { return file.name == spec; });
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
  std::vector<std::string> names;
  const std::size_t word_end = spec.find(' ');  // "h100 x8": the word is meant to be a GPU
  for (const EmbeddedFile& file :
       catalog.first(word_end == std::string::npos ? catalog.size() : 0)) {
    names.emplace_back(file.name);
  }
  const std::vector<std::string> gpus = GpuNames();
  names.insert(names.end(), gpus.begin(), gpus.end());
  throw InputError("cluster", '"' + spec + '"',
                   "a name from `shardwright list clusters`, a .json file or a description such as "
                   "\"h100-80 x8, nvlink 450 GB/s, nic 4x200 Gbit/s\"",
                   Hint(spec.substr(0, word_end), names));
}

}  // namespace

MathType MathTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return MathType::kBf16;
    case DType::kFp16:
      return MathType::kFp16;
    case DType::kFp8:
      return MathType::kFp8;
    case DType::kFp32:
    case DType::kFp64:
    case DType::kInt64:
    case DType::kInt32:
    case DType::kUint8:
    case DType::kBool:
      break;
  }
  return MathType::kFp32;
}

const char* MathTypeName(MathType type) {
  switch (type) {
    case MathType::kFp32:
      return "fp32";
    case MathType::kTf32:
      return "tf32";
    case MathType::kFp16:
      return "fp16";
    case MathType::kBf16:
      return "bf16";
    case MathType::kFp8:
      return "fp8";
  }
  return "";
}

std::optional<FlopsPerSecond> PeakFlops(const GpuSpec& gpu, MathType type) {
  const auto& peak = gpu.peak_flops[static_cast<std::size_t>(type)];
  return peak ? std::optional(peak->value) : std::nullopt;
}

Cluster LoadCluster(const std::string& spec, std::int64_t nodes, std::int64_t gpus) {
  const Spelled spelled = IsPath(spec.substr(0, spec.find(','))) ? Spelled{spec, 0} : Spell(spec);
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
  std::sort(summaries.begin(), summaries.end(),
            [](const ClusterSummary& a, const ClusterSummary& b) { return a.name < b.name; });
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
