#pragma once

// Clusters from what tools say about a machine: `nvidia-smi topo -m`, NCCL's topology dump and
// hwloc's XML. docs/import.md, section "Topology".

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "topologies/cluster.h"

namespace shardwright {

// What the text does not say. Given values win over those of the text.
struct TopologyOptions {
  std::string gpu;                    // catalog name; empty: as the text says
  std::optional<BytesPerSecond> nic;  // rate of one NIC, per direction
  std::optional<Bytes> host_memory;   // of the node
  std::string network;                // row of the profile's transports; empty: "default"
  std::int64_t nodes = 1;
  std::string name = "imported";
};

enum class TopologyFormat : std::uint8_t { kMatrix, kNcclXml, kHwlocXml };
[[nodiscard]] std::string_view NameOf(TopologyFormat format);

struct ImportedTopology {
  Cluster cluster;
  TopologyFormat format = TopologyFormat::kMatrix;
  std::vector<std::string> notes;  // what was assumed, and what the text cannot show
};

// Nothing when the text is none of the formats.
[[nodiscard]] std::optional<TopologyFormat> DetectTopology(std::string_view text);

// Reads `text`; `file` names it in errors. Throws InputError for damaged text, text without GPUs,
// and when nothing says which GPU it is.
[[nodiscard]] ImportedTopology ImportTopology(std::string_view text, const std::string& file,
                                              const TopologyOptions& options);

}  // namespace shardwright
