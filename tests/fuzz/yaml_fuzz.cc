// YAML of Accelerate, axolotl and scripts around the Trainer.

#include <vector>

#include "planner/importers/run_settings.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadRun(std::vector{FileWith(bytes, MemoryName() + ".yaml")});
}

}  // namespace shardwright::fuzz
