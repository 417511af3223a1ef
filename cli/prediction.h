#pragma once

// The report of shardwright simulate.

#include <string>

#include <nlohmann/json_fwd.hpp>

#include "analysis/prediction.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/simulate.h"

namespace shardwright {

// The report for people, and as JSON (docs/cli.md names the keys).
[[nodiscard]] std::string PredictionText(const PlanFile& file, const Program& program,
                                         const SimulationResult& result,
                                         const Prediction& prediction);
[[nodiscard]] std::string PredictionJson(const PlanFile& file, const Program& program,
                                         const SimulationResult& result,
                                         const Prediction& prediction);

// A number by name for every category.
[[nodiscard]] nlohmann::ordered_json BytesByCategory(const MemoryPeak& peak);

}  // namespace shardwright
