// IDX arrays, plain and gzip.

#include "executor/data/idx.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadIdx(FileWith(bytes));
}

}  // namespace shardwright::fuzz
