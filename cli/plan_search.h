#pragma once

// `plan` with a search: from flags to the best plan, and its report.

#include <string>
#include <vector>

#include "cli/plan_options.h"
#include "planner/fixes.h"
#include "planner/search.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct SearchedPlan {
  PlanFile file;  // with the chosen plan, if there is one
  SearchResult result;
  std::vector<Fix> fixes;  // if nothing fits
};

// Searches what the flags leave open. Shows progress on standard error if that is a terminal;
// Ctrl-C ends the search with the best plan so far. Throws InputError and UsageError as
// MakePlanFile does.
[[nodiscard]] SearchedPlan SearchPlan(const PlanOptions& options);

// The report for people, and as JSON (docs/planning.md names the keys). `output` is where the plan
// went; empty: nowhere, and the JSON report contains it.
[[nodiscard]] std::string SearchText(const SearchedPlan& searched, const std::string& output);
[[nodiscard]] std::string SearchJson(const SearchedPlan& searched, const std::string& output);

}  // namespace shardwright
