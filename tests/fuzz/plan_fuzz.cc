// Plan files with all that they embed.

#include "schedule/plan_file.h"
#include "tests/fuzz/fuzz.h"

namespace shardwright::fuzz {

void Read(std::string_view bytes) {
  (void)ParsePlanFile(bytes, "fuzz");
}

}  // namespace shardwright::fuzz
