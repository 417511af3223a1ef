#include "cli/run_list.h"

#include <array>
#include <iterator>

#include "cli/flow.h"
#include "cli/plan_options.h"
#include "core/error.h"
#include "core/files.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

constexpr const char* kFormat = "shardwright-runs";

std::string TextOf(const JsonValue& json, const char* key) {
  const auto value = json.Find(key);
  return value ? value->AsString() : "";
}

bool IsSet(const JsonValue& json, const char* key) {
  const auto value = json.Find(key);
  return value && value->AsBool();
}

PlanFile PlanOfFlags(const JsonValue& flags) {
  std::vector<std::string> known =
      Mapped<std::string>(SharedFlags("plan"), [&](const FlagRow& row) { return LongName(row); });
  flags.AllowOnly(known);
  Arguments arguments;
  arguments.command = "plan";
  for (const std::string& flag : flags.Keys()) {
    arguments.text[flag] = flags.At(flag).AsString();
  }
  try {
    return MakePlanFile(ReadPlanOptions(arguments));
  } catch (const UsageError& error) {
    throw InputError(flags.path().str() + ": " + error.what());
  }
}

}  // namespace

bool IsRunList(const std::string& file) {
  if (!IsRegularFile(file)) {
    return false;  // a folder of traces
  }
  std::array<char, 256> text{};
  (void)InputFile(file).Read(text.data(), text.size());
  return std::string_view(text.data(), text.size()).find(kFormat) != std::string_view::npos;
}

RunList ReadRunList(const std::string& file) {
  const JsonValue json = JsonValue::ReadFile(file);
  json.AllowOnly({"format", "version", "bands", "plans", "repeat", "runs"});
  (void)json.At("format").AsChoice({kFormat});
  (void)json.At("version").AsInt(1, 1);
  RunList list;
  list.has_bands = IsSet(json, "bands");
  list.wants_plans = IsSet(json, "plans");
  list.repeats = IsSet(json, "repeat");
  const JsonValue runs = json.At("runs");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    list.runs.push_back(runs[i]);
  }
  return list;
}

MeasuredRun ReadRun(const JsonValue& run) {
  run.AllowOnly({"id", "source", "model", "variant", "step_time_s", "flags", "plan"});
  MeasuredRun found;
  found.id = run.At("id").AsString();
  found.source = TextOf(run, "source");
  found.model = TextOf(run, "model");
  found.variant = TextOf(run, "variant");
  const auto time = run.Find("step_time_s");
  found.step_time_s = time ? time->AsDouble() : 0;
  if (found.step_time_s < 0) {
    throw time->Error("seconds per step");
  }
  const auto plan = run.Find("plan");
  found.plan = plan ? ReadPlanFile(plan->AsString()) : PlanOfFlags(run.At("flags"));
  return found;
}

std::vector<MeasuredRun> ReadRuns(const RunList& list) {
  std::vector<MeasuredRun> runs;
  std::transform(list.runs.begin(), list.runs.end(), std::back_inserter(runs), ReadRun);
  return runs;
}

}  // namespace shardwright
