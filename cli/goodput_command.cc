#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "analysis/goodput.h"
#include "cli/command.h"
#include "cli/flow.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "planner/evaluate.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

struct GoodputFlags {
  std::int64_t tokens = 0;
  FailureModel failures;
  Seconds interval;  // 0: the best
};

GoodputFlags ReadGoodputFlags(const Arguments& arguments) {
  for (const char* name : {"--tokens", "--mtbf", "--checkpoint-time"}) {
    arguments.Require(name);
  }
  GoodputFlags flags;
  flags.tokens = ReadWholeNumber(arguments.Get("--tokens"), 1);
  flags.failures.node_mtbf = ReadTime(arguments.Get("--mtbf"), false);
  flags.failures.checkpoint_time = ReadTime(arguments.Get("--checkpoint-time"), true);
  flags.failures.restart_time = Seconds(600.0);
  const auto read = [](const Flag& flag) { return ReadTime(flag, true); };
  arguments.Set("--restart-time", flags.failures.restart_time, read);
  const Flag interval = arguments.Get("--checkpoint-interval");
  if (interval.is_given() && interval.text != "auto") {
    flags.interval = ReadTime(interval, false);
  }
  return flags;
}

std::string Hours(Seconds time) {
  const double hours = time.value / 3600.0;
  return Fixed(hours, hours < 100.0 ? "%.2f h" : "%.0f h");
}

std::string Number(double value) {
  return Fixed(value, "%.3g");
}

std::string Text(const PlanFile& file, const GoodputFlags& flags, const Outcome& outcome,
                 const RunEstimate& run) {
  const Seconds step = outcome.step_time;
  const Seconds interval = step * static_cast<double>(run.interval_steps);
  const auto share = [&](Seconds part) {
    return Hours(part) + " (" + Percent(part.value / run.expected.value) + ")";
  };
  Table table({kLeft, kLeft});
  table.Row({"steps", WithCommas(run.steps) + " of " + Format(step)});
  table.Row({"work without failures", share(run.work)});
  table.Row({"checkpoints", share(run.checkpointing) + ", every " + WithCommas(run.interval_steps) +
                                " steps (" + Format(interval) + ")"});
  table.Row({"failures", share(run.lost) + ", " + Number(run.expected_failures) +
                             " expected, one in " + Hours(JobMtbf(flags.failures))});
  table.Row({"expected time",
             Hours(run.expected) + ", " + Number(run.expected.value / 86400.0) + " days"});
  const double gpu_hours =
      run.expected.value / 3600.0 * static_cast<double>(file.cluster.RankCount());
  table.Row({"GPU-hours", WithCommas(static_cast<std::int64_t>(std::llround(gpu_hours)))});
  table.Row({"goodput", Percent(run.Goodput())});
  return TitleOf(file) + "\n" + table.Text(2);
}

std::string GoodputJson(const PlanFile& file, const GoodputFlags& flags, const Outcome& outcome,
                        const RunEstimate& run) {
  const Seconds step = outcome.step_time;
  Json json = ReportHead("shardwright-goodput");
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["nodes"] = file.cluster.node_count;
  json["ranks"] = file.cluster.RankCount();
  json["step_time_s"] = step.value;
  json["steps"] = run.steps;
  json["job_mtbf_s"] = JobMtbf(flags.failures).value;
  json["checkpoint_interval_steps"] = run.interval_steps;
  json["checkpoint_interval_s"] = step.value * static_cast<double>(run.interval_steps);
  json["best_interval_s"] = BestInterval(flags.failures).value;
  json["checkpoints"] = run.checkpoints;
  json["expected_failures"] = run.expected_failures;
  json["work_s"] = run.work.value;
  json["checkpointing_s"] = run.checkpointing.value;
  json["lost_s"] = run.lost.value;
  json["expected_s"] = run.expected.value;
  json["goodput"] = run.Goodput();
  json["gpu_hours"] = run.expected.value / 3600.0 * static_cast<double>(file.cluster.RankCount());
  json["fits"] = outcome.Fits();
  return json.dump(2) + "\n";
}

}  // namespace

int GoodputCommand(const Arguments& arguments) {
  GoodputFlags flags = ReadGoodputFlags(arguments);
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  if (file.job.mode != JobMode::kTrain) {
    throw InputError("job.mode", "forward", "train; a run that only infers has no state to save");
  }
  const Outcome outcome = Evaluate(file, file.plan);
  flags.failures.nodes = file.cluster.node_count;
  const double per_step = static_cast<double>(file.job.global_batch) *
                          static_cast<double>(file.model.tokens_per_sample);
  const auto steps = static_cast<std::int64_t>(
      std::max(1.0, std::ceil(static_cast<double>(flags.tokens) / per_step)));
  const Seconds step = outcome.step_time;
  const double asked = std::round(flags.interval.value / step.value);
  const std::int64_t interval =
      flags.interval.value > 0.0
          ? static_cast<std::int64_t>(std::clamp(asked, 1.0, static_cast<double>(steps)))
          : 0;
  const RunEstimate run = EstimateRun(steps, step, interval, flags.failures);
  if (!std::isfinite(run.expected.value)) {
    throw InputError("--mtbf", Format(flags.failures.node_mtbf),
                     "nodes that run long enough for a checkpoint to be reached");
  }
  arguments.Print(arguments.IsJson() ? GoodputJson(file, flags, outcome, run)
                                     : Text(file, flags, outcome, run));
  for (const Misfit& misfit : outcome.misfits) {
    Warn(misfit.text);
  }
  return outcome.Fits() ? kExitOk : kExitNo;
}

}  // namespace shardwright
