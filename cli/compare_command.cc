#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "analysis/compare.h"
#include "analysis/compare_recording.h"
#include "analysis/run_match.h"
#include "cli/command.h"
#include "cli/comparison_print.h"
#include "cli/flow.h"
#include "cli/recordings.h"
#include "core/error.h"
#include "core/files.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "simulator/costs/pricer.h"
#include "simulator/simulate.h"
#include "traces/chrome_read.h"
#include "traces/measured_file.h"

namespace shardwright {
namespace {

// "10%" or "0.1".
double ReadPercent(const Flag& flag) {
  std::string text = flag.text;
  double scale = 1.0;
  if (text.ends_with('%')) {
    text.pop_back();
    scale = 0.01;
  }
  std::size_t used = 0;
  double value = -1;
  try {
    value = std::stod(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size() || !(value >= 0) || !std::isfinite(value)) {
    throw UsageError(flag.name + ": got \"" + flag.text +
                     "\", expected a percentage such as 10%, or a fraction such as 0.1");
  }
  return value * scale;
}

// Plans say what they are at their beginning; traces that carry a plan do so later.
bool IsPlan(const std::string& file) {
  constexpr std::size_t kEnough = 4096;
  std::string head(kEnough, '\0');
  head.resize(InputFile(file, "a plan or a simulated trace").Read(head.data(), head.size()));
  const std::size_t plan = head.find("\"shardwright-plan\"");
  return plan != std::string::npos && plan < head.find("\"schemaVersion\"");
}

PlanFile FindPlan(const Arguments& arguments, bool sim_is_plan, const std::string& measured) {
  const std::string sim = arguments.Get("SIM").text;
  if (arguments.Get("--plan").is_given()) {
    return ReadPlanFile(arguments.Get("--plan").text, arguments.streams);
  }
  if (sim_is_plan) {
    return ReadPlanFile(sim, arguments.streams);
  }
  std::vector<std::string> traces = {sim};
  if (DetectMeasured(measured) == MeasuredKind::kTrace) {
    traces.push_back(measured);
  }
  for (const std::string& trace : traces) {
    const TraceHeader header = ReadTraceHeader(trace);
    if (!header.plan.empty()) {
      return ParsePlanFile(header.plan, trace + ": plan");
    }
  }
  throw InputError(sim, "a trace without its plan", "a trace that carries one, or --plan FILE");
}

struct Simulation {
  Trace trace;
  std::optional<SimTime> period;
};

Simulation SimulationOf(const std::string& sim, bool sim_is_plan, const PlanFile& file,
                        const Program& program, bool contention) {
  if (!sim_is_plan) {
    return {ReadChromeTrace(sim, program), ReadTraceHeader(sim).step_time};
  }
  SimulateOptions options = SimulateOptionsOf(file, program);
  options.contention = contention;
  options.trace = true;
  SimulationResult result = Simulate(program, file.cluster, file.profile, options);
  return {std::move(result.trace), result.step_time};
}

// Of a trace of our own, whose plan the trace carries; no groups where it does not.
RunMatch MatchOwnTrace(const std::string& measured, const Program& program) {
  const std::string plan = ReadTraceHeader(measured).plan;
  return plan.empty()
             ? RunMatch()
             : MatchPrograms(program, LowerAndVerify(ParsePlanFile(plan, measured + ": plan")));
}

// Nothing is compared with what is no run of the plan: a table of gaps would only mislead.
int SayNoRun(const Arguments& arguments, const PlanFile& file, const RunMatch& match) {
  if (!arguments.IsJson()) {
    arguments.Print(MatchText(match));
    return kExitNo;
  }
  nlohmann::ordered_json json = ReportHead("shardwright-comparison");
  json["model"] = file.model.name;
  json["cluster"] = file.cluster.name;
  json["match"] = nlohmann::ordered_json::parse(MatchJson(match));
  json["findings"] = {match.Verdict()};
  arguments.Print(json.dump(2) + "\n");
  return kExitNo;
}

}  // namespace

int CompareCommand(const Arguments& arguments) {
  double limit = std::numeric_limits<double>::infinity();
  arguments.Set("--fail-above", limit, ReadPercent);
  EngineOptions engine;
  arguments.Set("--contention", engine.contention, ReadSwitch);
  const std::string sim = arguments.Get("SIM").text;
  const std::vector<std::string> measured = TraceFilesOf(arguments.lists.at("MEASURED"));
  const bool sim_is_plan = IsPlan(sim);
  const bool is_ours = DetectMeasured(measured.front()) == MeasuredKind::kTrace;
  if (is_ours && measured.size() > 1) {
    throw UsageError("a trace of shardwright run holds all ranks: one MEASURED is enough");
  }
  const PlanFile file = FindPlan(arguments, sim_is_plan, measured.front());
  const Program program = LowerAndVerify(file);
  const std::vector<ProfilerRecording> recordings =
      is_ours ? std::vector<ProfilerRecording>() : ReadRecordings(measured);
  const RunMatch match =
      is_ours ? MatchOwnTrace(measured.front(), program) : MatchRecordings(program, recordings);
  if (!match.IsRun()) {
    return SayNoRun(arguments, file, match);
  }
  const Simulation simulation = SimulationOf(sim, sim_is_plan, file, program, engine.contention);
  const PriceTable prices = PriceProgram(program, file.cluster, file.profile);
  Comparison comparison = is_ours ? Compare({.program = program,
                                             .simulated = simulation.trace,
                                             .simulated_period = simulation.period,
                                             .measured = ReadChromeTrace(measured.front(), program),
                                             .prices = prices,
                                             .engine = engine,
                                             .core_share = CoreShare(file.cluster)})
                                  : CompareRecording({.program = program,
                                                      .cluster = file.cluster,
                                                      .profile = file.profile,
                                                      .simulated = simulation.trace,
                                                      .simulated_period = simulation.period,
                                                      .recordings = recordings,
                                                      .prices = prices,
                                                      .engine = engine});
  comparison.match = match;
  arguments.Print(arguments.IsJson() ? ComparisonJson(file, program, comparison)
                                     : ComparisonText(file, program, comparison));
  const bool is_far = std::abs(comparison.gap()) > limit;
  return is_far || !comparison.findings.empty() ? kExitNo : kExitOk;
}

}  // namespace shardwright
