// Chakra execution traces.

#include "tests/fuzz/fuzz.h"
#include "traces/chakra_read.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadChakra(FileWith(bytes));
}

}  // namespace shardwright::fuzz
