#pragma once

// `plan` with a search: from flags to the best plan, and its report.

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "analysis/confidence.h"
#include "cli/plan_options.h"
#include "planner/baselines.h"
#include "planner/explain.h"
#include "planner/fixes.h"
#include "planner/front.h"
#include "planner/search.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct SearchedPlan {
  PlanFile file;  // with the chosen plan, if there is one
  SearchResult result;
  std::vector<Fix> fixes;                  // if nothing fits
  Confidence confidence;                   // of the step time
  std::vector<BaselineResult> baselines;   // under the same memory limit
  std::optional<Explanation> explanation;  // if asked for
  bool whole_front = false;                // Objective::kPareto
  bool is_explained = false;               // --explain
  std::vector<NodeCountResult> counts;     // with Objective::kCost
  // Of the same choices by our own schedule, where no dialect was asked for; none: it does not fit.
  std::optional<Seconds> native_time;
  // Of a faster plan that offloads, where the gain is within the band of the prediction.
  std::optional<Seconds> offload_time;
  bool is_interrupted = false;  // by a Ctrl-C of ours: parts may be missing
};

// "fsdp2 with ep 8": what tells one of several searches.
[[nodiscard]] std::string VariantName(const Plan& plan);

// Searches what the flags leave open, and shows progress on standard error. `stop`, or Ctrl-C where
// that is null, ends the search with the best plan so far; Ctrl-C ends the program where that takes
// more than a moment. Throws InputError and UsageError as MakePlanFile does.
[[nodiscard]] SearchedPlan SearchPlan(const PlanOptions& options, const std::atomic<bool>* stop);

// The same for the job, model, cluster, kernel set and profile of `job`, whatever `options` say of
// them.
[[nodiscard]] SearchedPlan SearchPlanOf(PlanFile job, const PlanOptions& options,
                                        const std::atomic<bool>* stop);

// The report for people, and as JSON (docs/planning.md names the keys). `output` is where the plan
// went; empty: nowhere, and the JSON report contains it.
[[nodiscard]] std::string SearchText(const SearchedPlan& searched, const std::string& output);
[[nodiscard]] std::string SearchJson(const SearchedPlan& searched, const std::string& output);

// Parts of them.
[[nodiscard]] std::string BaselinesText(const SearchedPlan& searched);
[[nodiscard]] std::string ExplanationText(const SearchedPlan& searched);
[[nodiscard]] std::string NodeCountsText(const SearchedPlan& searched);
// Of any kind of baseline, without its memory; and of what would make a job fit.
[[nodiscard]] nlohmann::ordered_json BaselineJson(const BaselineResult& baseline);
[[nodiscard]] nlohmann::ordered_json FixesJson(const std::vector<Fix>& fixes);
void AddBaselinesJson(const SearchedPlan& searched, nlohmann::ordered_json& json);
void AddExplanationJson(const SearchedPlan& searched, nlohmann::ordered_json& json);
void AddNodeCountsJson(const SearchedPlan& searched, nlohmann::ordered_json& json);

}  // namespace shardwright
