#include "topologies/internal/machine.h"

#include <array>
#include <cmath>
#include <map>
#include <utility>

#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "topologies/internal/cluster_json.h"
#include "topologies/internal/node_builder.h"

namespace shardwright::internal {
namespace {

constexpr double kGigabytes = 1e9;
// Between sockets: NCCL's constant for Sapphire Rapids, as in the catalog's DGX H100.
constexpr BytesPerSecond kSocketRate{22 * kGigabytes};
constexpr std::int64_t kMostParts = 4096;

// Drops what carries nothing, and bridges with one thing below them.
void Simplify(Machine& machine) {
  std::vector<Machine::Part>& parts = machine.parts;
  std::vector<std::int32_t> children(parts.size(), 0);
  std::vector<bool> counts(parts.size(), false);
  // Parents stand before their children.
  for (std::size_t i = parts.size(); i-- > 0;) {
    const bool is_leaf =
        parts[i].kind == Machine::Kind::kGpu || parts[i].kind == Machine::Kind::kNic;
    counts[i] = is_leaf || children[i] > 0 || parts[i].kind == Machine::Kind::kCpu;
    if (counts[i] && parts[i].parent >= 0) {
      ++children[static_cast<std::size_t>(parts[i].parent)];
    }
  }
  std::vector<std::int32_t> number(parts.size(), -1);
  std::vector<Machine::Part> kept;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!counts[i]) {
      continue;
    }
    Machine::Part part = parts[i];
    while (part.parent >= 0) {
      const auto above = static_cast<std::size_t>(part.parent);
      if (parts[above].kind != Machine::Kind::kSwitch || children[above] > 1) {
        break;
      }
      if (parts[above].link.value > 0 && (part.link.value <= 0 || parts[above].link < part.link)) {
        part.link = parts[above].link;
      }
      part.parent = parts[above].parent;
    }
    if (part.kind == Machine::Kind::kSwitch && children[i] == 1) {
      continue;
    }
    part.parent = part.parent < 0 ? -1 : number[static_cast<std::size_t>(part.parent)];
    number[i] = static_cast<std::int32_t>(kept.size());
    kept.push_back(part);
  }
  for (Machine::Nvlink& link : machine.nvlinks) {
    link.gpu = number[static_cast<std::size_t>(link.gpu)];
    link.peer = link.peer < 0 ? link.peer : number[static_cast<std::size_t>(link.peer)];
  }
  parts = std::move(kept);
}

// CPUs without anything below them have nothing to say, unless there is no other.
class NodeOfMachine {
 public:
  NodeOfMachine(const Machine& machine, const GpuSpec& gpu, const TopologyOptions& options,
                const std::string& file, std::vector<std::string>& notes)
      : machine_(machine),
        gpu_(gpu),
        options_(options),
        where_(file),
        origin_{NumberKind::kAssumed, "imported from " + file, ""},
        notes_(notes) {}

  NodeType Build() {
    NameParts();
    for (std::size_t i = 0; i < machine_.parts.size(); ++i) {
      AddPart(i);
    }
    AddMemories();
    for (std::size_t i = 0; i < machine_.parts.size(); ++i) {
      const Machine::Part& part = machine_.parts[i];
      if (part.parent >= 0) {
        const BytesPerSecond known = part.link.value > 0 ? part.link : gpu_.host_link.value;
        Connect(names_[i], names_[static_cast<std::size_t>(part.parent)], LinkKind::kPcie, known);
      }
    }
    for (std::size_t i = 0; i < cpus_.size(); ++i) {
      for (std::size_t j = i + 1; j < cpus_.size(); ++j) {
        Connect(cpus_[i], cpus_[j], LinkKind::kCpu, kSocketRate);
      }
    }
    AddNvlinks();
    return builder_.Finish(where_);
  }

  [[nodiscard]] std::int64_t gpu_count() const { return gpu_count_; }

 private:
  void NameParts() {
    std::array<std::int64_t, 4> counts{};
    for (const Machine::Part& part : machine_.parts) {
      static constexpr std::array<const char*, 4> kNames = {"cpu", "switch", "gpu", "nic"};
      const auto kind = static_cast<std::size_t>(part.kind);
      names_.push_back(kNames[kind] + std::to_string(counts[kind]++));
      if (part.kind == Machine::Kind::kCpu) {
        cpus_.push_back(names_.back());
      }
    }
    gpu_count_ = counts[static_cast<std::size_t>(Machine::Kind::kGpu)];
  }

  void AddPart(std::size_t i) {
    static constexpr std::array<ComponentKind, 4> kKinds = {
        ComponentKind::kCpu, ComponentKind::kPcieSwitch, ComponentKind::kGpu, ComponentKind::kNic};
    const Machine::Part& part = machine_.parts[i];
    Component component;
    component.name = names_[i];
    component.kind = kKinds[static_cast<std::size_t>(part.kind)];
    component.origin = origin_;
    if (part.kind == Machine::Kind::kNic) {
      component.bandwidth = options_.nic ? *options_.nic : part.speed;
      if (component.bandwidth.value <= 0) {
        throw InputError(where_.str(), "NICs without their rate", "--nic \"400 Gbit/s\"");
      }
    }
    builder_.AddGroup(component, 1, where_);
  }

  void AddMemories() {
    const Bytes known = Summed<Bytes>(machine_.parts, &Machine::Part::memory);
    const auto share = static_cast<std::int64_t>(cpus_.size());
    if (!options_.host_memory && known == Bytes(0)) {
      notes_.emplace_back("host memory: not seen, so offloading is not planned; see --host");
    }
    std::size_t cpu = 0;
    for (const Machine::Part& part : machine_.parts) {
      if (part.kind != Machine::Kind::kCpu) {
        continue;
      }
      Component memory;
      memory.name = "memory" + std::to_string(cpu);
      memory.kind = ComponentKind::kHostMemory;
      memory.origin = origin_;
      memory.capacity =
          options_.host_memory ? Bytes(options_.host_memory->value / share) : part.memory;
      builder_.AddGroup(memory, 1, where_);
      // Not to limit copies of which nothing is known.
      Connect(cpus_[cpu++], memory.name, LinkKind::kMemory,
              gpu_.host_link.value * static_cast<double>(std::max<std::int64_t>(gpu_count_, 1)));
    }
  }

  void AddNvlinks() {
    const NvlinkSpec spec = NvlinksOf(gpu_);
    std::vector<Machine::Nvlink> links = machine_.nvlinks;
    if (!machine_.knows_nvlink && spec.links > 0 && gpu_count_ > 1) {
      notes_.push_back("NVLink: not seen; every GPU is taken to reach a switch at " +
                       Format(gpu_.scale_up->value) + ", as its data sheet has it");
      for (std::size_t i = 0; i < machine_.parts.size(); ++i) {
        if (machine_.parts[i].kind == Machine::Kind::kGpu) {
          links.push_back({static_cast<std::int32_t>(i), Machine::kSwitchPeer, spec.links});
        }
      }
    }
    if (!links.empty() && spec.links == 0) {
      throw InputError(where_.str(), "NVLinks", "GPUs that have some; " + gpu_.name + " has none");
    }
    const bool has_switch =
        AnyOf(links, [](const auto& link) { return link.peer == Machine::kSwitchPeer; });
    if (has_switch) {
      Component nvswitch;
      nvswitch.name = "nvswitch";
      nvswitch.kind = ComponentKind::kNvSwitch;
      nvswitch.origin = origin_;
      builder_.AddGroup(nvswitch, 1, where_);
    }
    std::map<std::pair<std::string, std::string>, std::int64_t> sums;
    for (const Machine::Nvlink& link : links) {
      const std::string& gpu = names_[static_cast<std::size_t>(link.gpu)];
      if (link.peer == Machine::kSwitchPeer) {
        sums[{gpu, "nvswitch"}] += link.count;
      } else {
        const std::string& peer = names_[static_cast<std::size_t>(link.peer)];
        // Both ends list their links.
        auto& sum = sums[std::minmax(gpu, peer)];
        sum = std::max(sum, link.count);
      }
    }
    for (const auto& [ends, count] : sums) {
      Connect(ends.first, ends.second, LinkKind::kNvlink, spec.rate * static_cast<double>(count));
    }
  }

  void Connect(const std::string& from, const std::string& to, LinkKind kind, BytesPerSecond rate) {
    const Link link{0, 0, kind, rate, rate, Seconds(0), origin_};
    builder_.Connect(from, to, LinkPattern::kSpread, link, where_);
  }

  const Machine& machine_;
  const GpuSpec& gpu_;
  const TopologyOptions& options_;
  Path where_;
  Origin origin_;
  std::vector<std::string>& notes_;
  NodeBuilder builder_;
  std::vector<std::string> names_, cpus_;
  std::int64_t gpu_count_ = 0;
};

}  // namespace

std::int32_t Machine::Add(Kind kind, std::int32_t parent, BytesPerSecond link) {
  Part part;
  part.kind = kind;
  part.parent = parent;
  part.link = link;
  parts.push_back(part);
  return static_cast<std::int32_t>(parts.size() - 1);
}

NvlinkSpec NvlinksOf(const GpuSpec& gpu) {
  if (!gpu.scale_up || gpu.vendor != "nvidia") {
    return {};
  }
  // Per direction and link: NVLink 2 to 4 have 25 GB/s, NVLink 5 has 50 GB/s.
  const BytesPerSecond rate{(gpu.architecture == "blackwell" ? 50 : 25) * kGigabytes};
  return {std::llround(Ratio(gpu.scale_up->value, rate)), rate};
}

ImportedTopology ClusterOfMachine(Machine machine, const std::string& file,
                                  const TopologyOptions& options) {
  if (std::ssize(machine.parts) > kMostParts) {
    throw InputError(file, std::to_string(machine.parts.size()) + " devices",
                     "at most " + std::to_string(kMostParts));
  }
  Simplify(machine);
  const std::string& gpu = options.gpu.empty() ? machine.gpu : options.gpu;
  if (gpu.empty()) {
    throw InputError(file, "nothing that says which GPU it is", "--gpu NAME",
                     "shardwright list gpus shows the names");
  }
  ImportedTopology result;
  result.notes = machine.notes;
  Cluster& cluster = result.cluster;
  cluster.gpu = FindGpu(gpu, options.gpu.empty() ? file : "--gpu");
  NodeOfMachine builder(machine, cluster.gpu, options, file, result.notes);
  cluster.node = builder.Build();
  cluster.name = options.name;
  cluster.spec = file;
  cluster.description = "imported from " + file;
  cluster.cpu_vendor = machine.cpu_vendor;
  cluster.network = options.network.empty() ? "default" : options.network;
  cluster.node_count = options.nodes;
  cluster.gpus_per_node = builder.gpu_count();
  if (options.nodes > 1) {
    result.notes.emplace_back("fabric between nodes: not seen, taken as non-blocking");
  }
  CheckCluster(cluster, file);
  return result;
}

}  // namespace shardwright::internal
