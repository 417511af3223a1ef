#pragma once

// What a run tells: a line per step, its report, and how it ended.

#include <functional>

#include "cli/run_flags.h"
#include "cli/run_loop.h"
#include "cli/run_session.h"
#include "schedule/plan_file.h"

namespace shardwright {

// One line per step on standard error, for people. Keeps references.
[[nodiscard]] std::function<void(const StepReport& report)> MakeProgress(
    const PlanFile& file, const TrainingOptions& training, const Sampler& sampler,
    std::int64_t steps);

// What a report is about, beside the session.
struct Ran {
  const PlanFile& file;
  const RunFlags& flags;
  const Sampler& sampler;
  const LoopReport& loop;
  const RunCheckpoints* checkpoints;  // null: none are saved
};

// The report, on standard output.
void WriteReport(const Ran& ran, RunSession& session, bool as_json);

// Throws RunError for a run that came to numbers which are none, EnvironmentError when the last
// checkpoint could not be saved; one before that could not is named on standard error.
void CheckOutcome(const Ran& ran);

// One line on standard error: where an interrupted run stands.
void SayInterrupted(const Ran& ran);

}  // namespace shardwright
