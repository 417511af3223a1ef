// Profile files.

#include "tests/fuzz/fuzz.h"
#include "topologies/profile.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ParseProfile(bytes, "fuzz");
}

}  // namespace shardwright::fuzz
