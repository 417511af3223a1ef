#include <algorithm>
#include <string>

#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/flow.h"
#include "cli/table.h"
#include "core/json.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

std::string Summary(const PlanFile& file, const Program& program, const std::string& output) {
  const Plan& plan = file.plan;
  std::int64_t largest = 0;
  for (const UnitInfo& unit : program.units) {
    largest = std::max(largest, unit.padded_elements);
  }
  Table table({kLeft, kLeft});
  table.Row({"parameters", WithCommas(CountParameters(file.model.model))});
  table.Row({"trainable", WithCommas(CountParameters(file.model.model, true))});
  table.Row({"units", WithCommas(static_cast<std::int64_t>(plan.units.size())) + ", the largest " +
                          WithCommas(largest) + " parameters"});
  table.Row({"ranks", WithCommas(plan.shard_size * plan.replicate_size) + " = shard " +
                          WithCommas(plan.shard_size) + " x replicate " +
                          WithCommas(plan.replicate_size)});
  table.Row({"batch", WithCommas(file.job.global_batch) + " = ranks x micro-batch " +
                          WithCommas(plan.micro_batch) + " x accumulation " +
                          WithCommas(plan.accumulation)});
  table.Row({"sequence", WithCommas(file.job.sequence_length)});
  table.Row({"program", WithCommas(static_cast<std::int64_t>(program.step.size())) +
                            " ops per step, verified"});
  return TitleOf(file) + "\n" + table.Text(2) + "Wrote " + output + "\n";
}

std::string SummaryJson(const PlanFile& file, const Program& program, const std::string& output) {
  Json json;
  json["schema"] = "shardwright-plan-summary";
  json["schema_version"] = 1;
  json["file"] = output;
  json["model"] = file.model.model.name;
  json["parameters"] = CountParameters(file.model.model);
  json["trainable_parameters"] = CountParameters(file.model.model, true);
  json["cluster"] = file.cluster.name;
  json["ranks"] = file.cluster.RankCount();
  json["dialect"] = NameOf(file.plan.dialect);
  json["shard_size"] = file.plan.shard_size;
  json["replicate_size"] = file.plan.replicate_size;
  json["micro_batch"] = file.plan.micro_batch;
  json["accumulation"] = file.plan.accumulation;
  json["global_batch"] = file.job.global_batch;
  json["sequence_length"] = file.job.sequence_length;
  json["units"] = file.plan.units.size();
  json["step_ops"] = program.step.size();
  return json.dump(2) + "\n";
}

}  // namespace

int RunPlan(const PlanCommand& options) {
  const PlanFile file = MakePlanFile(options);
  for (const std::string& warning : file.model.model.warnings) {
    Warn(warning);
  }
  // Lowered here too, so that a plan that its dialect cannot express is never written.
  const Program program = LowerAndVerify(file);
  WriteFileAtomically(options.output, PlanFileJson(file));
  if (options.output != "-") {
    WriteFileAtomically("-", options.json ? SummaryJson(file, program, options.output)
                                          : Summary(file, program, options.output));
  }
  return 0;
}

}  // namespace shardwright
