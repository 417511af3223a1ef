
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_search.h"
#include "cli/table.h"
#include "core/json.h"
#include "core/ranges.h"
#include "planner/baselines.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

std::string Text(const std::vector<BaselineResult>& results) {
  Table table({kLeft, kRight, kRight, kRight, kRight, kRight, kLeft, kLeft});
  table.Row({"", "step time", "tokens/s/GPU", "MFU", "device", "micro", "recompute", ""});
  for (const BaselineResult& result : results) {
    const std::string name(NameOf(result.baseline));
    if (!result.outcome) {
      table.Row({name, "-", "-", "-", "-", "-", "-", result.refusal});
      continue;
    }
    const Outcome& outcome = *result.outcome;
    const auto tokens = static_cast<std::int64_t>(outcome.rates.tokens_per_second_per_gpu);
    table.Row({name, result.Fits() ? Format(outcome.step_time) : "-",
               result.Fits() ? WithCommas(tokens) : "-",
               result.Fits() ? Percent(outcome.rates.mfu) : "-", Format(outcome.DeviceTotal()),
               WithCommas(result.choice.micro_batch), std::string(RecomputeName(result.choice)),
               result.Fits() ? (result.fuses_adam ? "Adam fused" : "")
                             : "over by " + Format(outcome.Excess())});
  }
  return table.Text();
}

std::string ToJson(const PlanFile& problem, const std::vector<BaselineResult>& results) {
  Json json = ReportHead("shardwright-baselines");
  json["model"] = problem.model.name;
  json["cluster"] = problem.cluster.name;
  json["ranks"] = problem.cluster.RankCount();
  json["global_batch"] = problem.job.global_batch;
  Json array = Json::array();
  for (const BaselineResult& result : results) {
    Json row = BaselineJson(result);
    if (result.outcome) {
      row["tokens_per_s_per_gpu"] = result.outcome->rates.tokens_per_second_per_gpu;
      row["mfu"] = result.outcome->rates.mfu;
      row["device_bytes"] = result.outcome->DeviceTotal().value;
      row["excess_bytes"] = result.outcome->Excess().value;
    }
    array.push_back(row);
  }
  json["baselines"] = array;
  return json.dump(2) + "\n";
}

}  // namespace

int BaselinesCommand(const Arguments& arguments) {
  PlanOptions options = ReadPlanOptions(arguments);
  options.search = true;  // the margin is that of a search
  options.has_margin = arguments.Get("--memory-margin").is_given();
  const PlanFile problem = MakeJobFile(options);
  const std::vector<BaselineResult> results = EvaluateBaselines(problem);
  arguments.Print(arguments.IsJson() ? ToJson(problem, results) : Text(results));
  const bool any_fits = AnyOf(results, &BaselineResult::Fits);
  return any_fits ? kExitOk : kExitNo;
}

}  // namespace shardwright
