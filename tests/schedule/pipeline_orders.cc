// Writes the order of actions of each rank for lines "schedule ranks stages-per-rank micro-batches"
// from standard input, or why there is none; with transfers.

#include <algorithm>
#include <iostream>
#include <string>

#include "schedule/pipeline.h"

int main() {
  using namespace shardwright;
  std::string name;
  Pipeline pipeline;
  while (std::cin >> name >> pipeline.ranks >> pipeline.stages_per_rank >> pipeline.micro_batches) {
    const auto found =
        std::find(kPipelineScheduleNames.begin(), kPipelineScheduleNames.end(), name);
    pipeline.schedule = static_cast<PipelineSchedule>(found - kPipelineScheduleNames.begin());
    if (const std::string why = WhyNot(pipeline); !why.empty()) {
      std::cout << "refused: " << why << "\n";
      continue;
    }
    for (std::int64_t rank = 0; rank < pipeline.ranks; ++rank) {
      std::cout << (rank > 0 ? "|" : "") << ActionsText(AddTransfers(pipeline, rank));
    }
    std::cout << "\n";
  }
  return 0;
}
