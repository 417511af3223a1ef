// NCCL's topology dump (NCCL_TOPO_DUMP_FILE) and hwloc's XML (lstopo --of xml). pugixml neither
// reads document types nor expands entities of their own, so entity bombs stay what they are: text.

#include <string>
#include <string_view>
#include <unordered_map>

#include <pugixml.hpp>

#include "core/error.h"
#include "core/portable.h"
#include "core/text.h"
#include "topologies/gpu_names.h"
#include "topologies/internal/machine.h"

namespace shardwright::internal {
namespace {

constexpr int kDeepest = 64;
constexpr double kMegabit = 1e6 / 8;

pugi::xml_document Parse(std::string_view text, const std::string& file) {
  pugi::xml_document document;
  const pugi::xml_parse_result result =
      document.load_buffer(text.data(), text.size(), pugi::parse_minimal, pugi::encoding_utf8);
  if (!result) {
    throw InputError(
        file, "broken XML at byte " + std::to_string(result.offset) + ": " + result.description(),
        "a whole document");
  }
  return document;
}

std::string PlaceOf(const std::string& file, const pugi::xml_node& node, const char* attribute) {
  return file + ": <" + std::string(node.name()).substr(0, 40) + ">: " + attribute;
}

// An attribute as a number in [0, most]; 0 where it is not there.
double NumberOf(const pugi::xml_node& node, const char* attribute, double most,
                const std::string& file) {
  const std::string_view text = node.attribute(attribute).value();
  if (text.empty()) {
    return 0;
  }
  const double value = NumberIn(text).value_or(-1);
  if (!(value >= 0 && value <= most)) {
    throw InputError(PlaceOf(file, node, attribute), Quoted(text.substr(0, 40)),
                     "a number, 0 or more");
  }
  return value;
}

// "32.0 GT/s PCIe" and "16": what the encoding leaves of it. 0: not known.
BytesPerSecond PcieRate(const pugi::xml_node& node, const std::string& file) {
  const std::string_view speed = node.attribute("link_speed").value();
  double transfers = 0;
  FromChars(speed.data(), speed.data() + speed.size(), transfers);
  const double width = NumberOf(node, "link_width", 64, file);
  if (!(transfers > 0 && transfers < 1000) || width <= 0) {
    return {};
  }
  constexpr double kOldest = 5;  // 8b/10b up to generation 2, then 128b/130b
  const double useful = transfers <= kOldest ? 0.8 : 128.0 / 130.0;
  return BytesPerSecond(transfers * 1e9 * width * useful / 8);
}

std::string VendorOf(std::string_view vendor) {
  return vendor == "GenuineIntel" ? "intel" : vendor == "AuthenticAMD" ? "amd" : "";
}

class NcclReader {
 public:
  explicit NcclReader(const std::string& file) : file_(file) {}

  Machine Read(const pugi::xml_node& system) {
    const std::string_view version = system.attribute("version").value();
    if (version != "1" && version != "2") {
      throw InputError(PlaceOf(file_, system, "version"),
                       '"' + std::string(version.substr(0, 40)) + '"', "1 (NCCL) or 2 (RCCL)");
    }
    for (const pugi::xml_node& cpu : system.children("cpu")) {
      const std::int32_t part = machine_.Add(Machine::Kind::kCpu, -1);
      machine_.cpu_vendor = VendorOf(cpu.attribute("vendor").value());
      AddPci(cpu, part, 0);
    }
    machine_.knows_nvlink = true;
    ResolveNvlinks();
    return std::move(machine_);
  }

 private:
  struct Pending {
    std::int32_t gpu;
    std::string target;
    std::int64_t count;
    bool to_switch;
  };

  void AddPci(const pugi::xml_node& parent, std::int32_t part, int depth) {
    if (depth > kDeepest) {
      throw InputError(file_, "PCI bridges nested deeper than 64", "a tree of PCI devices");
    }
    for (const pugi::xml_node& nic : parent.children("nic")) {
      AddNets(nic, part, {});
    }
    for (const pugi::xml_node& pci : parent.children("pci")) {
      const BytesPerSecond rate = PcieRate(pci, file_);
      const pugi::xml_node gpu = pci.child("gpu");
      if (gpu) {
        AddGpu(pci, gpu, machine_.Add(Machine::Kind::kGpu, part, rate));
      } else if (pci.child("nic")) {
        for (const pugi::xml_node& nic : pci.children("nic")) {
          AddNets(nic, part, rate);
        }
      } else {
        AddPci(pci, machine_.Add(Machine::Kind::kSwitch, part, rate), depth + 1);
      }
    }
  }

  // Ports of one card are nets of their own; those that only have host interfaces have no speed.
  void AddNets(const pugi::xml_node& nic, std::int32_t parent, BytesPerSecond rate) {
    for (const pugi::xml_node& net : nic.children("net")) {
      constexpr double kMostMegabits = 1e8;
      const double speed = NumberOf(net, "speed", kMostMegabits, file_);
      const std::int32_t part = machine_.Add(Machine::Kind::kNic, parent, rate);
      machine_.parts[static_cast<std::size_t>(part)].speed = BytesPerSecond(speed * kMegabit);
    }
  }

  void AddGpu(const pugi::xml_node& pci, const pugi::xml_node& gpu, std::int32_t part) {
    busids_.emplace(pci.attribute("busid").value(), part);
    const std::string name = GpuOfPciDevice(pci.attribute("device").value());
    if (busids_.size() == 1) {
      machine_.gpu = name;
    } else if (machine_.gpu != name) {
      machine_.notes.emplace_back("different GPUs in one node: all are taken as the first");
    }
    for (const pugi::xml_node& link : gpu.children("nvlink")) {
      constexpr double kMostLinks = 1024;
      const auto count = static_cast<std::int64_t>(NumberOf(link, "count", kMostLinks, file_));
      // 0x068000: bridge, other; that is what an NVSwitch calls itself.
      const std::string_view type = link.attribute("tclass").value();
      pending_.push_back(
          {part, link.attribute("target").value(), count, type.starts_with("0x0680")});
    }
  }

  void ResolveNvlinks() {
    for (const Pending& link : pending_) {
      if (link.count <= 0) {
        continue;
      }
      if (link.to_switch) {
        machine_.nvlinks.push_back({link.gpu, Machine::kSwitchPeer, link.count});
        continue;
      }
      const auto found = busids_.find(link.target);
      if (found == busids_.end()) {
        machine_.notes.push_back("an NVLink to \"" + link.target.substr(0, 40) +
                                 "\", which is no GPU of this node, is left out");
      } else if (found->second != link.gpu) {
        machine_.nvlinks.push_back({link.gpu, found->second, link.count});
      }
    }
  }

  std::string file_;
  Machine machine_;
  std::vector<Pending> pending_;
  std::unordered_map<std::string, std::int32_t> busids_;
};

class HwlocReader {
 public:
  explicit HwlocReader(const std::string& file) : file_(file) {}

  Machine Read(const pugi::xml_node& topology) {
    for (const pugi::xml_node& object : topology.children("object")) {
      Walk(object, -1, 0);
    }
    machine_.notes.emplace_back("hwloc does not show NVLink");
    return std::move(machine_);
  }

 private:
  static bool IsType(const pugi::xml_node& object, std::string_view type) {
    return object.attribute("type").value() == type;
  }

  void Walk(const pugi::xml_node& object, std::int32_t parent, int depth) {
    if (depth > kDeepest) {
      throw InputError(file_, "objects nested deeper than 64", "what lstopo --of xml writes");
    }
    std::int32_t below = parent;
    if (IsType(object, "Package") || (IsType(object, "Machine") && !HasPackage(object))) {
      below = machine_.Add(Machine::Kind::kCpu, -1);
    } else if (IsType(object, "NUMANode")) {
      AddMemory(object, parent);
      return;
    } else if (IsType(object, "PCIDev")) {
      AddDevice(object, CpuOr(parent));
      return;
    } else if (IsType(object, "Bridge")) {
      below = machine_.Add(Machine::Kind::kSwitch, CpuOr(parent), LinkRate(object));
    }
    for (const pugi::xml_node& info : object.children("info")) {
      if (std::string_view(info.attribute("name").value()) == "CPUVendor") {
        machine_.cpu_vendor = VendorOf(info.attribute("value").value());
      }
    }
    // Packages first: machines list their own bridges last, but memory may stand before.
    for (const pugi::xml_node& child : object.children("object")) {
      Walk(child, below, depth + 1);
    }
  }

  static bool HasPackage(const pugi::xml_node& object) {
    for (const pugi::xml_node& child : object.children("object")) {
      if (IsType(child, "Package") || (IsType(child, "Group") && HasPackageBelow(child))) {
        return true;
      }
    }
    return false;
  }
  // One level of groups is what lstopo puts between.
  static bool HasPackageBelow(const pugi::xml_node& group) {
    for (const pugi::xml_node& child : group.children("object")) {
      if (IsType(child, "Package")) {
        return true;
      }
    }
    return false;
  }

  // What hangs on the machine itself hangs on its first CPU.
  std::int32_t CpuOr(std::int32_t parent) {
    if (parent >= 0) {
      return parent;
    }
    for (std::size_t i = 0; i < machine_.parts.size(); ++i) {
      if (machine_.parts[i].kind == Machine::Kind::kCpu) {
        return static_cast<std::int32_t>(i);
      }
    }
    return machine_.Add(Machine::Kind::kCpu, -1);
  }

  void AddMemory(const pugi::xml_node& object, std::int32_t parent) {
    constexpr double kMostBytes = 1e15;
    const double bytes = NumberOf(object, "local_memory", kMostBytes, file_);
    std::int32_t cpu = CpuOr(parent);
    while (machine_.parts[static_cast<std::size_t>(cpu)].parent >= 0) {
      cpu = machine_.parts[static_cast<std::size_t>(cpu)].parent;
    }
    machine_.parts[static_cast<std::size_t>(cpu)].memory += Bytes(static_cast<std::int64_t>(bytes));
  }

  // Gigabytes per second, as hwloc has it; 0 where it could not see it.
  BytesPerSecond LinkRate(const pugi::xml_node& object) {
    constexpr double kMost = 1e5;
    return BytesPerSecond(NumberOf(object, "pci_link_speed", kMost, file_) * 1e9);
  }

  // "0302 [10de:2330] [10de:16c1] a1": class, vendor and device.
  void AddDevice(const pugi::xml_node& object, std::int32_t parent) {
    const std::string_view type = object.attribute("pci_type").value();
    const bool is_display = type.starts_with("0300") || type.starts_with("0302") ||
                            type.starts_with("0380") || type.starts_with("1200");
    const bool is_maker = type.find("[10de:") != std::string_view::npos ||
                          type.find("[1002:") != std::string_view::npos;
    if (is_display && is_maker) {
      (void)machine_.Add(Machine::Kind::kGpu, parent, LinkRate(object));
      const std::size_t at = type.find("[10de:");
      if (machine_.gpu.empty() && at != std::string_view::npos && type.size() >= at + 10) {
        machine_.gpu = GpuOfPciDevice(type.substr(at + 6, 4));
      }
      return;
    }
    for (const pugi::xml_node& child : object.children("object")) {
      constexpr std::string_view kOpenFabrics = "3";
      if (IsType(child, "OSDev") &&
          std::string_view(child.attribute("osdev_type").value()) == kOpenFabrics) {
        (void)machine_.Add(Machine::Kind::kNic, parent, LinkRate(object));
      }
    }
  }

  std::string file_;
  Machine machine_;
};

}  // namespace

Machine ReadNcclXml(std::string_view text, const std::string& file) {
  const pugi::xml_document document = Parse(text, file);
  const pugi::xml_node system = document.child("system");
  if (!system) {
    throw InputError(file, "no <system>", "what NCCL_TOPO_DUMP_FILE writes");
  }
  return NcclReader(file).Read(system);
}

Machine ReadHwlocXml(std::string_view text, const std::string& file) {
  const pugi::xml_document document = Parse(text, file);
  const pugi::xml_node topology = document.child("topology");
  if (!topology) {
    throw InputError(file, "no <topology>", "what lstopo --of xml writes");
  }
  return HwlocReader(file).Read(topology);
}

}  // namespace shardwright::internal
