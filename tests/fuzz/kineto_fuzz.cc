// Traces of PyTorch's profiler, plain and gzip.

#include <string>

#include "core/error.h"
#include "tests/fuzz/fuzz.h"
#include "traces/kineto.h"
#include "traces/timed_calls.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  const std::string file = FileWith(bytes);
  try {
    (void)ReadTimedCalls(file);
  } catch (const InputError&) {
  }
  (void)ReadKineto(file);
}

}  // namespace shardwright::fuzz
