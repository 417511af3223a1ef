// Headers of safetensors files.

#include "executor/checkpoint/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadSafetensorsHeader(FileWith(bytes));
}

}  // namespace shardwright::fuzz
