#pragma once

// What `shardwright advise` says, as values and as text.

#include <optional>
#include <string>
#include <vector>

#include "analysis/advice.h"
#include "analysis/calibrate.h"
#include "analysis/run_match.h"
#include "analysis/step_costs.h"
#include "cli/plan_diff.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct BetterPlan {
  PlanFile file;      // with the corrected profile
  Seconds step_time;  // predicted: what was measured times what is simulated of both
  double gain = 0;    // part of the step
  double band = 0;    // half-width of the gain
  Bytes memory_before, memory_after;  // what the device holds
  std::vector<PlanChange> changes;    // of job and plan
  std::string target;                 // whose files the patch changes; "plan": the plan file
  std::string patch;
};

struct AdviseReport {
  std::string title;
  StepCosts costs;
  bool has_plan = false;
  // With a plan only.
  std::optional<RunMatch> match;                 // of recordings of other profilers
  std::optional<CalibrationResult> calibration;  // none for a simulation
  bool is_corrected = false;  // false: the profile was not changed, since that would be worse
  std::optional<BetterPlan> better;
  std::vector<Advice> advice;  // the first one first
  bool has_fsdp_problem = false;
  std::vector<std::string> notes;
};

[[nodiscard]] std::string AdviseText(const AdviseReport& report);
[[nodiscard]] std::string AdviseJson(const AdviseReport& report);

}  // namespace shardwright
