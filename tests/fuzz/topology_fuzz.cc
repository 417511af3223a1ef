// XML of NCCL and hwloc, and the matrix of nvidia-smi.

#include "tests/fuzz/fuzz.h"
#include "topologies/import_topology.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  TopologyOptions options;
  options.gpu = "h100-80";
  options.nic = BytesPerSecond(50e9);
  (void)ImportTopology(bytes, "fuzz", options);
}

}  // namespace shardwright::fuzz
