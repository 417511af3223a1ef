// Cluster files.

#include "tests/fuzz/fuzz.h"
#include "topologies/cluster.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ParseCluster(bytes, "fuzz");
}

}  // namespace shardwright::fuzz
