// Traces of PyTorch's profiler, plain and gzip.

#include "tests/fuzz/fuzz.h"
#include "traces/kineto.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadKineto(FileWith(bytes));
}

}  // namespace shardwright::fuzz
