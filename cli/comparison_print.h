#pragma once

#include <string>

#include "analysis/compare.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"

namespace shardwright {

// The comparison for people, and as JSON (docs/compare.md names the keys).
[[nodiscard]] std::string ComparisonText(const PlanFile& file, const Program& program,
                                         const Comparison& comparison);
[[nodiscard]] std::string ComparisonJson(const PlanFile& file, const Program& program,
                                         const Comparison& comparison);

}  // namespace shardwright
