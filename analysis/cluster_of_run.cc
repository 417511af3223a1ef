#include "analysis/cluster_of_run.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/error.h"

namespace shardwright {
namespace {

// What a GPU class of the tables is in our catalog, and what its nodes usually have.
struct GpuClass {
  std::string_view prefix;  // of the column
  std::string_view gpu;
  std::string_view note;         // empty: the same thing
  std::int64_t nic_gbit_per_s;   // per GPU, where the row does not name the network
  std::int64_t host_memory_gib;  // of a node of eight GPUs; only offload reads it
  std::string_view words = "";   // in what the source calls the GPU
};
// The first row that fits counts. NIC rates: DGX A100 and H100 class machines; Jean Zay has one
// 100 Gbit/s Omni-Path port per V100.
constexpr std::array<GpuClass, 28> kGpuClasses = {{
    {"A100-40GB", "a100-40", "", 200, 1024},
    {"A100-80GB", "a100-80", "", 200, 2048},
    {"A100-PCIe", "a100-pcie-80", "", 200, 1024},
    {"A100", "a100-40", "A100 of unknown size taken as a100-40", 200, 1024},
    {"A800-80GB", "a800-80", "", 200, 2048},
    {"H800", "h800-80", "", 400, 2048},
    {"H100-PCIe", "h100-pcie-80", "", 400, 1024},
    {"GH200", "gh200-96", "", 400, 512},
    {"H100-96GB", "h100-96", "", 400, 2048},
    {"H100-95GB", "h100-96", "", 400, 2048},
    {"H100-80GB", "h100-80", "", 400, 2048},
    {"H100", "h100-80", "H100 of unknown kind taken as h100-80", 400, 2048},
    {"H200", "h200-141", "", 400, 2048},
    {"GB200", "gb200-186", "", 400, 1024},
    {"B200", "b200-180-limited", "", 400, 2048, "power limited"},
    {"B200", "b200-180", "", 400, 2048},
    {"GB300", "gb300-288", "", 400, 1024},
    {"MI300X", "mi300x", "", 400, 2048},
    {"V100-32GB", "v100-32", "", 100, 384},
    {"V100-16GB", "v100-16", "", 100, 384},
    {"A10G-24GB", "a10", "A10G taken as a10", 50, 384},
    {"RTX5090", "rtx-5090", "", 25, 128},
    {"RTX4090", "rtx-4090", "", 25, 128},
    {"RTX3090", "rtx-3090", "", 25, 128},
    {"Titan RTX", "titan-rtx", "", 25, 128},
    {"RTX A6000", "rtx-a6000", "", 25, 256},
    {"L40S", "l40s", "", 100, 512},
    {"L4", "l4", "", 50, 256},
}};

const GpuClass& FindClass(const MeasuredRun& run) {
  for (const GpuClass& row : kGpuClasses) {
    if (run.gpu_class.starts_with(row.prefix) && run.gpu.find(row.words) != std::string::npos) {
      return row;
    }
  }
  throw InputError("gpu_class", '"' + run.gpu_class + '"', "a GPU type of the catalog");
}

// The number that ends just before `at`, or nothing.
std::optional<std::int64_t> NumberBefore(std::string_view text, std::size_t at) {
  std::size_t begin = at;
  while (begin > 0 && std::isdigit(static_cast<unsigned char>(text[begin - 1])) != 0) {
    --begin;
  }
  if (begin == at || at - begin > 6) {
    return std::nullopt;
  }
  std::int64_t value = 0;
  for (const char c : text.substr(begin, at - begin)) {
    value = value * 10 + (c - '0');
  }
  return value;
}

struct Nics {
  std::int64_t count = 0;
  std::int64_t gbit_per_s = 0;  // each
};

// "8x200Gb RoCE", "400Gb/s RDMA per GPU", "800Gbps": NICs of a node with `gpus` GPUs.
std::optional<Nics> ReadNics(std::string_view text, std::int64_t gpus) {
  const std::size_t unit = text.find("Gb");
  if (unit == std::string_view::npos) {
    return std::nullopt;
  }
  const std::optional<std::int64_t> rate = NumberBefore(text, unit);
  if (!rate.has_value() || *rate == 0) {
    return std::nullopt;
  }
  const std::size_t digits = std::to_string(*rate).size();
  if (unit > digits && text[unit - digits - 1] == 'x') {
    const std::optional<std::int64_t> count = NumberBefore(text, unit - digits - 1);
    if (count.has_value() && *count > 0) {
      return Nics{*count, *rate};
    }
  }
  if (text.find("per GPU") != std::string_view::npos) {
    return Nics{gpus, *rate};
  }
  // A rate of the whole node; all GPUs share it evenly over 100 Gbit/s ports.
  constexpr std::int64_t kPort = 100;
  return *rate % kPort == 0 ? Nics{*rate / kPort, kPort} : Nics{1, *rate};
}

std::string_view NetworkKind(std::string_view text) {
  const auto has = [text](std::string_view part) {
    return text.find(part) != std::string_view::npos;
  };
  if (has("RoCE") || has("RDMA")) {
    return "roce";
  }
  if (has("EFA")) {
    return "efa";
  }
  if (has("Omni-Path") || has("OPA")) {
    return "opa";
  }
  return has("TCPXO") ? "tcpxo" : "ib";
}

}  // namespace

Cluster ClusterOfRun(const MeasuredRun& run, std::vector<std::string>& notes) {
  const GpuClass& gpu = FindClass(run);
  if (run.gpus <= 0) {
    throw InputError("gpus", "nothing", "a number of GPUs");
  }
  if (!gpu.note.empty()) {
    notes.emplace_back(gpu.note);
  }
  constexpr std::int64_t kUsualNode = 8;
  const std::int64_t node =
      std::min(run.gpus, run.gpus_per_node > 0 ? run.gpus_per_node : kUsualNode);
  if (run.gpus % node != 0) {
    throw InputError("gpus", std::to_string(run.gpus),
                     "a multiple of gpus_per_node " + std::to_string(node));
  }
  const std::int64_t nodes = run.gpus / node;
  Nics nics = {node, gpu.nic_gbit_per_s};
  std::string_view network = "ib";
  if (nodes > 1) {
    const std::optional<Nics> named = ReadNics(run.network, node);
    if (named.has_value()) {
      nics = *named;
      network = NetworkKind(run.network);
    } else {
      network = NetworkKind(run.network);
      notes.push_back("network not stated: " + std::to_string(nics.gbit_per_s) + " Gbit/s " +
                      (network == "opa" ? "Omni-Path" : "InfiniBand") + " per GPU");
    }
  }
  const std::int64_t host_gib = std::max<std::int64_t>(gpu.host_memory_gib * node / kUsualNode, 64);
  const std::string text = std::string(gpu.gpu) + " x" + std::to_string(node) + ", nic " +
                           std::to_string(nics.count) + "x" + std::to_string(nics.gbit_per_s) +
                           " Gbit/s, host " + std::to_string(host_gib) + " GiB, network " +
                           std::string(network);
  return LoadCluster(text, nodes);
}

}  // namespace shardwright
