// Pickles of the CUDA allocator's history.

#include "tests/fuzz/fuzz.h"
#include "traces/memory_snapshot.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadMemorySnapshot(FileWith(bytes));
}

}  // namespace shardwright::fuzz
