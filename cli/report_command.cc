#include <array>
#include <optional>

#include "analysis/compare.h"
#include "analysis/compare_recording.h"
#include "analysis/prediction.h"
#include "analysis/report/report.h"
#include "cli/command.h"
#include "cli/comparison_print.h"
#include "cli/flow.h"
#include "cli/prediction.h"
#include "cli/recordings.h"
#include "cli/table.h"
#include "core/budget.h"
#include "core/error.h"
#include "core/json.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "simulator/costs/pricer.h"
#include "simulator/simulate.h"
#include "traces/chrome_read.h"
#include "traces/measured_file.h"

namespace shardwright {
namespace {

// Without a scheme it is relative to where the report lies.
std::string ReadPageAddress(const Flag& flag) {
  constexpr std::array<std::string_view, 3> kSchemes = {"https", "http", "file"};
  const std::string scheme = flag.text.substr(0, flag.text.find_first_of(":/?#"));
  const bool has_scheme = scheme.size() < flag.text.size() && flag.text[scheme.size()] == ':';
  if (has_scheme && !IsIn(kSchemes, scheme)) {
    RefuseFlag(flag, "an address that begins with https:, http: or file:, or a relative one");
  }
  return flag.text;
}

// Which trace is which, by what they say of themselves.
struct TraceFiles {
  std::string simulated;
  std::string measured;                 // of ours
  std::vector<std::string> recordings;  // of other profilers, one per rank
};

TraceFiles FindTraces(const Arguments& arguments) {
  std::vector<std::string> given;
  if (arguments.Get("SIM").is_given()) {
    given.push_back(arguments.Get("SIM").text);
  }
  const auto list = arguments.lists.find("MEASURED");
  if (list != arguments.lists.end()) {
    given.insert(given.end(), list->second.begin(), list->second.end());
  }
  constexpr const char* kExpected = "one simulated trace and one measured trace";
  TraceFiles files;
  for (const std::string& file : TraceFilesOf(given)) {
    const bool is_ours = DetectMeasured(file) == MeasuredKind::kTrace;
    const bool is_simulated = is_ours && ReadTraceHeader(file).source == "simulated";
    if (is_simulated && !files.simulated.empty()) {
      throw InputError(file, "a second simulated trace", kExpected);
    }
    const bool is_second = is_ours ? !files.recordings.empty() : false;
    if (!is_simulated && (!files.measured.empty() || is_second)) {
      throw InputError(file, "a second measured trace", kExpected);
    }
    if (is_ours) {
      (is_simulated ? files.simulated : files.measured) = file;
    } else {
      files.recordings.push_back(file);
    }
  }
  return files;
}

// The simulation, as `simulate --exact` does it, with the spans of a trace where one is given.
SimulationResult SimulateForReport(const PlanFile& file, const Program& program,
                                   const std::string& trace) {
  SimulateOptions options = SimulateOptionsOf(file, program);
  options.trace = true;
  SimulationResult result = Simulate(program, file.cluster, file.profile, options);
  if (!trace.empty()) {
    const std::optional<SimTime> period = ReadTraceHeader(trace).step_time;
    result.trace = ReadChromeTrace(trace, program);
    if (period && *period != result.step_time) {
      Warn(trace + " was simulated with other options or by another version: its step takes " +
           Format(ToSeconds(*period)) + ", the plan's " + Format(ToSeconds(result.step_time)));
      result.step_time = *period;
    }
  }
  return result;
}

// What else was considered; nothing without the flags.
std::optional<Choices> ReadChoices(const Arguments& arguments) {
  const Flag search = arguments.Get("--search");
  const Flag sweep = arguments.Get("--what-if");
  if (!search.is_given() && !sweep.is_given()) {
    return std::nullopt;
  }
  Choices choices;
  if (search.is_given()) {
    ReadSearch(JsonValue::ReadFile(search.text), choices);
  }
  if (sweep.is_given()) {
    ReadSweep(JsonValue::ReadFile(sweep.text), choices);
  }
  return choices;
}

}  // namespace

int ReportCommand(const Arguments& arguments) {
  const std::string page = ReadPageAddress(arguments.Get("--page"));
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  const TraceFiles traces = FindTraces(arguments);
  const std::string output = arguments.Get("--output").text;
  const std::optional<Choices> choices = ReadChoices(arguments);
  const Program program = LowerAndVerify(file);
  constexpr std::int64_t kMostOps = 500'000;  // 60 MB of a page
  Budget(arguments.Get("PLAN").text, "ops of a step for a page", kMostOps)
      .Take(static_cast<std::int64_t>(program.step.size()));
  const SimulationResult result = SimulateForReport(file, program, traces.simulated);
  const Prediction prediction = Predict(file, program, result);
  std::optional<Trace> measured;
  std::vector<ProfilerRecording> recordings;
  std::optional<Comparison> comparison;
  if (!traces.measured.empty()) {
    measured = ReadChromeTrace(traces.measured, program);
    comparison = Compare({.program = program,
                          .simulated = result.trace,
                          .simulated_period = result.step_time,
                          .measured = *measured,
                          .prices = PriceProgram(program, file.cluster, file.profile),
                          .engine = EngineOptions(),
                          .core_share = CoreShare(file.cluster)});
  } else if (!traces.recordings.empty()) {
    recordings = ReadRecordings(traces.recordings);
    comparison = CompareRecording({.program = program,
                                   .cluster = file.cluster,
                                   .profile = file.profile,
                                   .simulated = result.trace,
                                   .simulated_period = result.step_time,
                                   .recordings = recordings,
                                   .prices = PriceProgram(program, file.cluster, file.profile),
                                   .engine = EngineOptions()});
  }
  const std::string title = TitleOf(file);
  const std::string plan_json = PlanFileJson(file);
  const std::string prediction_json = PredictionJson(file, program, result, prediction);
  const ReportInput input{
      .title = title,
      .file = file,
      .plan_json = plan_json,
      .prediction_json = prediction_json,
      .program = program,
      .simulation = result,
      .prediction = prediction,
      .measured = measured ? &*measured : nullptr,
      .recorded = recordings.empty() ? nullptr : &recordings.front(),
      .comparison = comparison ? &*comparison : nullptr,
      .comparison_json = comparison ? ComparisonJson(file, program, *comparison) : "",
      .choices = choices ? &*choices : nullptr,
      .page = page};
  const std::string verdict = Wrapped(VerdictOf(input), kReportWidth, 2);
  arguments.Deliver(output, "page",
                    arguments.IsJson() ? ReportJson(input) + "\n" : ReportHtml(input),
                    [&verdict](const std::string& written) {
                      return verdict + (written.empty() ? "" : "Wrote " + written + "\n");
                    });
  return kExitOk;
}

}  // namespace shardwright
