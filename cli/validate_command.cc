
#include <nlohmann/json.hpp>

#include "analysis/confidence.h"
#include "analysis/predict_run.h"
#include "cli/command.h"
#include "cli/repeated_runs.h"
#include "cli/run_list.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/parallel.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// What is said of one run, or why nothing is.
Json PredictListed(const JsonValue& listed, const RunList& list) {
  Json json = {{"id", listed.At("id").AsString()}};
  try {
    const MeasuredRun run = ReadRun(listed);
    const PlanFile& plan = run.plan;
    if (list.wants_plans) {
      json["plan"] = Json::parse(PlanFileJson(plan));
      return json;
    }
    const RunPrediction prediction = PredictRun(plan);
    json["step_time_s"] = prediction.step_time.value;
    json["measured_step_time_s"] = run.step_time_s > 0 ? Json(run.step_time_s) : Json();
    json["allocated"] = prediction.allocated.value;
    json["reserved"] = prediction.reserved.value;
    json["outside"] = prediction.outside.value;
    json["usable"] = prediction.usable.value;
    json["out_of_memory"] = prediction.out_of_memory;
    json["profile"] = plan.profile.name;
    json["parameters"] = CountParameters(plan.model);
    if (list.has_bands) {
      const Confidence confidence = ConfidenceOf(plan, run.source);
      json["band"] = confidence.band;
      json["band_kind"] = confidence.kind;
    }
  } catch (const InputError& error) {
    json["error"] = error.what();
  }
  return json;
}

std::string PredictionsText(const std::vector<Json>& runs) {
  using Align = Table::Align;
  Table table(
      {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight, Align::kLeft});
  table.Row({"run", "step", "measured", "off by", "reserved", ""});
  for (const Json& run : runs) {
    const bool is_predicted = run.contains("step_time_s");
    const bool is_measured = is_predicted && run["measured_step_time_s"].is_number();
    const double measured = is_measured ? run["measured_step_time_s"].get<double>() : 1;
    table.Row({run["id"], is_predicted ? Format(Seconds(run["step_time_s"])) : "",
               is_measured ? Format(Seconds(measured)) : "",
               is_measured ? SignedPercent(run["step_time_s"].get<double>() / measured - 1) : "",
               is_predicted ? Format(Bytes(run["reserved"])) : "",
               is_predicted ? (run["out_of_memory"] ? "out of memory" : "")
                            : run.value("error", std::string())});
  }
  return table.WrappedText(0);
}

}  // namespace

int ValidateCommand(const Arguments& arguments) {
  if (const Flag folder = arguments.Get("--profiles"); folder.is_given()) {
    ShipProfilesOf(folder.text);
  }
  const RunList list = ReadRunList(arguments.Get("RUNS").text);
  if (list.repeats) {
    RepeatRuns(list, arguments);
    return kExitOk;
  }
  std::vector<Json> runs(list.runs.size());
  ParallelFor(runs.size(), ThreadCount(),
              [&](std::size_t i, std::size_t) { runs[i] = PredictListed(list.runs[i], list); });
  Json json = ReportHead("shardwright-predictions");
  json["runs"] = runs;
  arguments.Print(arguments.IsJson() ? json.dump(2) + '\n' : PredictionsText(runs));
  return kExitOk;
}

}  // namespace shardwright
