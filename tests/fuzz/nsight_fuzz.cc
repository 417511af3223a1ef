// SQLite exports of Nsight Systems.

#include "tests/fuzz/fuzz.h"
#include "traces/nsight.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadNsight(FileWith(bytes));
}

}  // namespace shardwright::fuzz
