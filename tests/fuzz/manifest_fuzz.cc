// Manifests of our checkpoints.

#include "executor/checkpoint/manifest.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ParseManifest(bytes, "fuzz");
}

}  // namespace shardwright::fuzz
