#include "cli/check_budget.h"

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/plan_options.h"
#include "core/budget.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ordered_json.h"
#include "core/ranges.h"
#include "planner/importers/document.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kLargestTolerance = 1.0;

// "5 %".
double ReadShare(const JsonValue& value) {
  const std::string text = value.AsString();
  std::size_t used = 0;
  double percent = -1;
  try {
    percent = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || (text.substr(used) != " %" && text.substr(used) != "%") ||
      !(percent >= 0 && percent <= 100 * kLargestTolerance)) {
    throw value.Error("a share such as \"5 %\", at most 100 %");
  }
  return percent / 100;
}

double ReadLimit(const JsonValue& value, GateMetric metric) {
  switch (metric) {
    case GateMetric::kMemory:
      return static_cast<double>(value.AsBytes().value);
    case GateMetric::kTime:
      return value.AsSeconds().value;
    case GateMetric::kExposed:
      return ReadShare(value);
    case GateMetric::kCost:
      break;
  }
  const double hours = value.AsDouble();
  if (!(hours > 0)) {
    throw value.Error("a number above 0");
  }
  return hours;
}

// The plan of `shardwright plan` with these flags.
PlanFile PlanOfFlags(const JsonValue& flags) {
  Arguments arguments;
  arguments.command = "plan";
  std::vector<std::string> names;
  for (const FlagRow& row : SharedFlags("plan")) {
    if (row.file != FileRole::kWrite) {
      names.push_back(LongName(row));
    }
  }
  for (std::size_t i = 0; i < flags.size(); i += 2) {
    const std::string name = flags[i].AsString();
    if (!IsIn(names, name)) {
      throw flags[i].Error("a flag of shardwright plan with a value", DidYouMean(name, names));
    }
    if (i + 1 == flags.size()) {
      throw flags[i].Error("a value behind it");
    }
    arguments.text[name] = flags[i + 1].AsString();
  }
  try {
    return MakePlanFile(ReadPlanOptions(arguments));
  } catch (const UsageError& error) {
    throw InputError(flags.path().str() + ": " + error.what());
  }
}

BudgetJob ReadBudgetJob(const std::string& name, const JsonValue& table) {
  std::vector<std::string> keys = {"plan", "flags"};
  for (std::size_t i = 0; i < kGateMetricCount; ++i) {
    keys.emplace_back(NameOf(static_cast<GateMetric>(i)));
  }
  table.AllowOnly(keys);
  const std::optional<JsonValue> plan = table.Find("plan");
  const std::optional<JsonValue> flags = table.Find("flags");
  if (plan.has_value() == flags.has_value()) {
    throw table.Error("either plan = \"FILE\" or flags = [\"--model\", ...]");
  }
  BudgetJob job;
  job.name = name;
  job.plan = plan ? ReadPlanFile(plan->AsString()) : PlanOfFlags(*flags);
  for (std::size_t i = 0; i < kGateMetricCount; ++i) {
    const auto metric = static_cast<GateMetric>(i);
    if (const std::optional<JsonValue> limit = table.Find(NameOf(metric))) {
      job.limits[i] = ReadLimit(*limit, metric);
    }
  }
  return job;
}

// Where "[job.NAME]" stands.
std::size_t LineOf(const std::string& text, const std::string& name) {
  for (const std::string& header : {"[job." + name + "]", "[job.\"" + name + "\"]"}) {
    const std::size_t at = text.find(header);
    if (at != std::string::npos) {
      return 1 + static_cast<std::size_t>(std::count(
                     text.begin(), text.begin() + static_cast<std::ptrdiff_t>(at), '\n'));
    }
  }
  return 1;
}

}  // namespace

JobBudget ReadBudget(const std::string& file) {
  const std::string text = ReadTextFile(file);
  const JsonValue document = ParseDocument(text, file);
  document.AllowOnly({"tolerance", "job"});
  JobBudget budget;
  if (const std::optional<JsonValue> tolerance = document.Find("tolerance")) {
    budget.tolerance = ReadShare(*tolerance);
  }
  constexpr std::int64_t kMostOps = 200'000;
  constexpr std::int64_t kLeastOps = 500;  // what a job costs even if its model has none
  Budget ops(file, "ops of the models of all jobs", kMostOps);
  const JsonValue jobs = document.At("job");
  for (const std::string& name : jobs.Keys()) {
    budget.jobs.push_back(ReadBudgetJob(name, jobs.At(name)));
    ops.Take(kLeastOps + std::ssize(budget.jobs.back().plan.model.ops));
    budget.jobs.back().line = LineOf(text, name);
  }
  return budget;
}

std::vector<RecordedJob> ReadRecord(const std::string& file) {
  const std::string text = ReadTextFile(file);
  const JsonValue document = JsonValue::Parse(text, file);
  document.AllowOnly({"schema", "schema_version", "jobs"});
  if (document.At("schema").AsString() != "shardwright-check-record") {
    throw document.At("schema").Error("\"shardwright-check-record\", as check --save writes it");
  }
  std::vector<RecordedJob> jobs;
  const JsonValue table = document.At("jobs");
  const std::vector<std::string> names = table.Keys();
  Json plans = ParseOrdered(text, file)["jobs"];
  for (const std::string& name : names) {
    const JsonValue job = table.At(name);
    RecordedJob recorded;
    recorded.name = name;
    for (std::size_t i = 0; i < kGateMetricCount; ++i) {
      recorded.figures.values[i] = job.At(NameOf(static_cast<GateMetric>(i))).AsDouble();
    }
    recorded.plan = ParsePlanFile(plans[name]["plan"].dump(), job.path().Field("plan").str());
    jobs.push_back(std::move(recorded));
  }
  return jobs;
}

std::string RecordJson(std::span<const RecordedJob> jobs) {
  Json json = ReportHead("shardwright-check-record");
  json["jobs"] = Json::object();
  for (const RecordedJob& job : jobs) {
    Json& row = json["jobs"][job.name];
    for (std::size_t i = 0; i < kGateMetricCount; ++i) {
      row[std::string(NameOf(static_cast<GateMetric>(i)))] = job.figures.values[i];
    }
    row["plan"] = ParseOrdered(PlanFileJson(job.plan), "plan");
  }
  return json.dump(1) + "\n";
}

}  // namespace shardwright
