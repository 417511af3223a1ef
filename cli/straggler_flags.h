#pragma once

// simulate's flags about ranks and links that are not as fast as the others.

#include <string>
#include <utility>
#include <vector>

#include "cli/command.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/jitter.h"
#include "simulator/simulate.h"

namespace shardwright {

// "3:1.5" or "8..15:1.2" (ranks 8 to 15), joined by commas. Throws UsageError.
[[nodiscard]] std::vector<SlowRank> ReadSlowRanks(const Flag& flag);

// "network:2": a level of the cluster's links and how many times slower it is. Throws UsageError.
[[nodiscard]] std::pair<std::string, double> ReadSlowLink(const Flag& flag);

struct StragglerFlags {
  bool is_sampled = false;  // noise or slow ranks were asked for
  JitterOptions jitter;
  std::vector<std::pair<std::string, double>> slow_links;
};

[[nodiscard]] StragglerFlags ReadStragglerFlags(const Arguments& arguments);

// The distribution of step times around a simulated plan. Requires a result with a trace.
[[nodiscard]] StepDistribution SampleSteps(const PlanFile& file, const Program& program,
                                           const SimulationResult& result, JitterOptions options);

}  // namespace shardwright
