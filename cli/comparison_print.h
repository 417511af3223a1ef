#pragma once

#include <string>

#include "analysis/compare.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"

namespace shardwright {

// Whether what was recorded is a run of the plan, with what is missing and what is too many; and as
// JSON.
[[nodiscard]] std::string MatchText(const RunMatch& match);
[[nodiscard]] std::string MatchJson(const RunMatch& match);

// The comparison for people, and as JSON (docs/compare.md names the keys).
[[nodiscard]] std::string ComparisonText(const PlanFile& file, const Program& program,
                                         const Comparison& comparison);
[[nodiscard]] std::string ComparisonJson(const PlanFile& file, const Program& program,
                                         const Comparison& comparison);

}  // namespace shardwright
