// What nccl-tests print, as text and as JSON.

#include "tests/fuzz/fuzz.h"
#include "traces/nccl_tests.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadCollectiveTest(FileWith(bytes), "all_gather");
}

}  // namespace shardwright::fuzz
