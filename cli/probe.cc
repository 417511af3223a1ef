#include "cli/probe.h"

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/ranges.h"
#include "topologies/gpu_names.h"

namespace shardwright {
namespace {

namespace fs = std::filesystem;

// What a program prints; nothing when it is not there or fails.
std::optional<std::string> OutputOf(const char* command) {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(::popen(command, "r"), ::pclose);
  if (pipe == nullptr) {
    return std::nullopt;
  }
  std::string text;
  std::array<char, 4096> piece{};
  constexpr std::size_t kMost = std::size_t{1} << 20;
  std::size_t count = 0;
  while (text.size() < kMost &&
         (count = std::fread(piece.data(), 1, piece.size(), pipe.get())) > 0) {
    text.append(piece.data(), count);
  }
  return text.empty() ? std::nullopt : std::optional(text);
}

std::string FirstLine(const fs::path& file) {
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);
  return line;
}

// "MemTotal:  527951234 kB"
std::optional<Bytes> HostMemory() {
  std::ifstream stream("/proc/meminfo");
  std::string key;
  std::int64_t kibibytes = 0;
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  if (stream >> key >> kibibytes && key == "MemTotal:" && kibibytes > 0 && kibibytes < kMost) {
    return Bytes(kibibytes * kKiB.value);
  }
  return std::nullopt;
}

// Rates of the InfiniBand and RoCE ports, "400 Gb/sec (4X NDR)".
std::vector<std::string> PortRates() {
  std::vector<std::string> rates;
  for (const fs::path& card : EntriesOf("/sys/class/infiniband")) {
    for (const fs::path& port : EntriesOf(card / "ports")) {
      rates.push_back(card.filename().string() + " " + FirstLine(port / "rate"));
    }
  }
  return rates;
}

void ProbeHost(TopologyOptions& options, ProbedMachine& machine) {
  const std::optional<Bytes> memory = HostMemory();
  if (memory) {
    machine.seen.push_back("host memory " + Format(*memory) + " (/proc/meminfo)");
    options.host_memory = options.host_memory ? options.host_memory : memory;
  } else {
    machine.not_seen.emplace_back("host memory: /proc/meminfo cannot be read");
  }
  const std::size_t numa = Summed<std::size_t>(
      EntriesOf("/sys/devices/system/node"),
      [&](const fs::path& entry) { return entry.filename().string().starts_with("node") ? 1 : 0; });
  if (numa > 0) {
    machine.seen.push_back(std::to_string(numa) + " NUMA nodes (/sys/devices/system/node)");
  }
  const std::vector<std::string> ports = PortRates();
  for (const std::string& port : ports) {
    machine.seen.push_back("port " + port + " (/sys/class/infiniband)");
  }
  if (ports.empty()) {
    machine.not_seen.emplace_back("InfiniBand and RoCE: nothing in /sys/class/infiniband");
  } else if (!options.nic) {
    const std::string& first = ports.front();
    const std::size_t begin = first.find(' ') + 1;
    const std::size_t end = first.find(' ', begin);
    try {
      options.nic = ParseBytesPerSecond(first.substr(begin, end - begin) + " Gbit/s", "port");
    } catch (const InputError&) {
      machine.not_seen.push_back("the rate of " + first);
    }
  }
}

}  // namespace

ProbedMachine ProbeMachine(TopologyOptions options) {
  ProbedMachine machine;
  ProbeHost(options, machine);
  const auto products = OutputOf("nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null");
  if (!products) {
    machine.not_seen.emplace_back("GPUs: nvidia-smi is not installed, or sees none");
    return machine;
  }
  const std::string product = products->substr(0, products->find('\n'));
  machine.seen.push_back("GPU " + product + " (nvidia-smi)");
  if (options.gpu.empty()) {
    options.gpu = GpuOfProduct(product);
  }
  if (options.gpu.empty()) {
    machine.not_seen.push_back("the catalog's name of " + product + "; see --gpu");
    return machine;
  }
  const auto matrix = OutputOf("nvidia-smi topo -m 2>/dev/null");
  if (!matrix || DetectTopology(*matrix) != TopologyFormat::kMatrix) {
    machine.not_seen.emplace_back("how GPUs are linked: nvidia-smi topo -m shows nothing");
    return machine;
  }
  machine.topology = ImportTopology(*matrix, "nvidia-smi topo -m", options);
  return machine;
}

}  // namespace shardwright
