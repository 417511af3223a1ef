// DeepSpeed's and Trainer's JSON, and command lines of scripts around the Trainer.

#include <vector>

#include "planner/importers/run_settings.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ReadRun(std::vector{FileWith(bytes, MemoryName() + ".txt")});
}

}  // namespace shardwright::fuzz
