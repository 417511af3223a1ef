#pragma once

// A machine as tools describe it: trees of PCIe below its CPUs, and NVLink between GPUs.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "topologies/import_topology.h"

namespace shardwright::internal {

class Machine {
 public:
  enum class Kind : std::uint8_t { kCpu, kSwitch, kGpu, kNic };
  struct Part {
    Kind kind = Kind::kCpu;
    std::int32_t parent = -1;  // of all but CPUs
    BytesPerSecond link;       // to the parent; 0: not known
    BytesPerSecond speed;      // of a NIC towards the fabric; 0: not known
    Bytes memory;              // of a CPU's host memory; 0: not known
  };
  // NVLinks from a GPU to a switch, or to another GPU (an index into the parts).
  struct Nvlink {
    std::int32_t gpu = 0;
    std::int32_t peer = kSwitchPeer;
    std::int64_t count = 0;
  };
  static constexpr std::int32_t kSwitchPeer = -1;

  std::vector<Part> parts;
  std::vector<Nvlink> nvlinks;
  bool knows_nvlink = false;  // without links there are none; else the GPU's data sheet decides
  std::string gpu;            // catalog name, where the tool says it
  std::string cpu_vendor;
  std::vector<std::string> notes;

  [[nodiscard]] std::int32_t Add(Kind kind, std::int32_t parent, BytesPerSecond link = {});
};

// The machine as one node of a cluster. Bridges without GPUs and NICs below them go, those with one
// thing below them become part of its link. `file` names the input in errors.
[[nodiscard]] ImportedTopology ClusterOfMachine(Machine machine, const std::string& file,
                                                const TopologyOptions& options);

[[nodiscard]] Machine ReadTopoMatrix(std::string_view text, const std::string& file,
                                     const TopologyOptions& options);
// Documents over 16 MiB, or nested deeper than 64, are refused; entities are not expanded.
[[nodiscard]] Machine ReadNcclXml(std::string_view text, const std::string& file);
[[nodiscard]] Machine ReadHwlocXml(std::string_view text, const std::string& file);

// NVLinks of one GPU in all and the rate of one, per direction; 0 where the GPU has none.
struct NvlinkSpec {
  std::int64_t links = 0;
  BytesPerSecond rate;
};
[[nodiscard]] NvlinkSpec NvlinksOf(const GpuSpec& gpu);

}  // namespace shardwright::internal
