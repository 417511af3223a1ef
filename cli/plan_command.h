#pragma once

// The three ways of `plan`: with all choices given, by a search, and beside a run.

#include "cli/command.h"
#include "cli/plan_search.h"

namespace shardwright {

// Writes what a search has found, if anything, and `report` of where that is: the path, or empty
// where the plan is inside of the report. Returns the exit code.
int ReportSearched(const PlanOptions& options, const Arguments& arguments,
                   const SearchedPlan& searched,
                   const std::function<std::string(const std::string&)>& report,
                   const std::string& imported_from = "");

// Searches for each of several dialects, or of the meshes that ep=any, tp=any, cp=any and pp=any
// stand for; the best plan of all is written.
int PlanVariants(const Arguments& arguments);

// What would be faster than the run of --from, in the framework that it came from.
int PlanBesideRun(const Arguments& arguments);

}  // namespace shardwright
