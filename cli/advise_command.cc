// What a running job should change, from a trace of it.

#include <array>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "analysis/calibrate.h"
#include "analysis/gain_band.h"
#include "cli/advise_report.h"
#include "cli/command.h"
#include "cli/comparison_print.h"
#include "cli/flow.h"
#include "cli/line_diff.h"
#include "cli/plan_diff.h"
#include "cli/recordings.h"
#include "cli/search_progress.h"
#include "cli/traced_run.h"
#include "core/json.h"
#include "core/ranges.h"
#include "core/writable.h"
#include "planner/emitters/emitters.h"
#include "planner/evaluate.h"
#include "planner/search.h"
#include "topologies/mesh.h"
#include "traces/chrome_read.h"
#include "traces/measured_file.h"

namespace shardwright {
namespace {

// A recording and what is known of its plan.
struct Traced {
  TracedRun run;  // of its file only the recordings count without a plan
  bool has_plan = false;
  bool is_simulation = false;
  std::optional<SimTime> period;  // of a simulation
};

Traced ReadTraced(const Arguments& arguments) {
  const std::vector<std::string> files = TraceFilesOf(arguments.lists.at("TRACE"));
  const bool is_ours = DetectMeasured(files.front()) == MeasuredKind::kTrace;
  if (is_ours && files.size() > 1) {
    throw UsageError("a trace of shardwright run holds all ranks: one TRACE is enough");
  }
  const Flag plan = arguments.Get("--plan");
  if (!is_ours) {
    Traced traced;
    traced.run.name = files.front();
    traced.run.recordings = ReadRecordings(files);
    traced.has_plan = plan.is_given();
    if (traced.has_plan) {
      traced.run.file = ReadPlanFile(plan.text, arguments.streams);
      traced.run.program = LowerAndVerify(traced.run.file);
    }
    return traced;
  }
  Traced traced;
  traced.has_plan = true;
  const TraceHeader header = ReadTraceHeader(files.front());
  traced.is_simulation = header.source == "simulated";
  traced.period = header.step_time;
  if (plan.is_given()) {
    traced.run.name = files.front();
    traced.run.file = ReadPlanFile(plan.text, arguments.streams);
    traced.run.program = LowerAndVerify(traced.run.file);
    traced.run.trace = ReadChromeTrace(files.front(), traced.run.program);
  } else {
    traced.run = ReadOwnTrace(files.front());
  }
  return traced;
}

FixedChoices ReadFixed(const Flag& flag, ReshardChoice& reshard, const Plan& plan) {
  static constexpr std::array<std::string_view, 8> kChoices = {
      "sync", "reshard", "prefetch", "offload", "recompute", "units", "batch", "mesh"};
  using Fixed = FixedChoices;  // null: the choice of resharding
  static constexpr bool Fixed::*kFixed[] = {
      &Fixed::sync,      nullptr,       &Fixed::prefetch,    &Fixed::offload,
      &Fixed::recompute, &Fixed::units, &Fixed::micro_batch, &Fixed::mesh};
  FixedChoices fixed;
  for (std::size_t begin = 0; flag.is_given() && begin <= flag.text.size();) {
    const std::size_t end = std::min(flag.text.find(',', begin), flag.text.size());
    const Flag one = {flag.name, flag.text.substr(begin, end - begin)};
    const std::size_t choice = ReadChoice(one, kChoices);
    if (kFixed[choice] == nullptr) {
      reshard = {true, plan.units.front().reshard};
    } else {
      fixed.*kFixed[choice] = true;
    }
    begin = end + 1;
  }
  fixed.in_flight = fixed.prefetch;
  return fixed;
}

SearchOptions OptionsOf(const Arguments& arguments, const Plan& plan) {
  SearchOptions options;
  options.base = plan;
  options.fixed = ReadFixed(arguments.Get("--fix"), options.reshard, plan);
  if (options.fixed.units) {
    options.reshard = {};  // units say it themselves
  }
  options.previous = &plan;
  options.stop = arguments.streams.stop;
  options.progress = ProgressLines(/*ticks=*/options.stop == nullptr);
  return options;
}

// Whose settings say a plan; null: no framework but our own executor.
const Emitter* EmitterOf(const Arguments& arguments, Dialect dialect) {
  std::vector<std::string_view> names = Mapped<std::string_view>(Emitters(), &Emitter::name);
  if (arguments.Get("--to").is_given()) {
    return &Emitters()[ReadChoice(arguments.Get("--to"), names)];
  }
  const std::string_view wanted = IsZero(dialect) ? "deepspeed" : NameOf(dialect);
  const auto found = FindIn(names, wanted);
  return found == names.end() ? nullptr
                              : &Emitters()[static_cast<std::size_t>(found - names.begin())];
}

void MakePatch(const Emitter* emitter, const PlanFile& now, BetterPlan& better) {
  better.target = emitter == nullptr ? "shardwright run" : std::string(emitter->name);
  if (emitter == nullptr) {
    better.patch = UnifiedDiff(PlanFileJson(now), PlanFileJson(better.file), "plan.json");
    return;
  }
  const Emission before = emitter->emit(now, {}), after = emitter->emit(better.file, {});
  for (const EmittedFile& file : after.files) {
    const auto same = FindIn(before.files, file.name, &EmittedFile::name);
    better.patch += UnifiedDiff(same == before.files.end() ? "" : same->text, file.text, file.name);
  }
}

// The fastest of what the search found and of single changes that fits, where that gains a percent.
std::optional<BetterPlan> FindBetter(const PlanFile& now, const SearchOptions& options,
                                     const SingleChanges& changes) {
  std::vector<Plan> plans;
  if (SearchResult found = Search(now, options); found.is_feasible) {
    plans.push_back(std::move(found.best.plan));
  }
  if (!changes.best.empty()) {
    plans.push_back(changes.best.front().plan);
  }
  const Outcome own = Evaluate(now, now.plan);
  std::optional<BetterPlan> better;
  Seconds least = own.step_time * (1 - kLeastGain);
  for (Plan& plan : plans) {
    PlanFile file = now;
    file.plan = std::move(plan);
    CheckPlan(file, file.plan, "plan");
    const Outcome outcome = Evaluate(file, file.plan);
    if (outcome.Fits() && outcome.step_time < least) {
      least = outcome.step_time;
      better.emplace();
      better->gain = 1 - outcome.step_time.value / own.step_time.value;
      better->memory_before = own.DeviceTotal();
      better->memory_after = outcome.DeviceTotal();
      better->file = std::move(file);
    }
  }
  return better;
}

// Corrects the profile of `file` by the trace, unless that is worse.
void Correct(const TracedRun& run, PlanFile& file, AdviseReport& report) {
  const Origin origin{NumberKind::kMeasured, "shardwright advise over " + run.name, Today()};
  report.calibration = Calibrate({CalibrationRunOf(run)}, file.profile, origin);
  report.is_corrected = !report.calibration->IsWorse();
  if (report.is_corrected) {
    const std::string name = file.profile.name;
    file.profile = report.calibration->profile;
    file.profile.name = name + "-corrected";
    file.profile.description = "Fitted by shardwright advise, from " + name;
    for (const std::string& transport : report.calibration->of_one_size) {
      report.notes.push_back(OneSizeNote(transport) +
                             "; bands of gains allow for half of its time");
    }
  }
}

void AdviseWithPlan(const Arguments& arguments, const Traced& traced, AdviseReport& report) {
  const TracedRun& run = traced.run;
  PlanFile now = run.file;
  if (now.job.global_batch == 0) {
    now.job.global_batch =
        MeshOf(now.plan).DataCount() * now.plan.micro_batch * now.plan.accumulation;
  }
  if (!traced.is_simulation) {  // which has nothing to tell about a profile
    Correct(run, now, report);
  }
  const SearchOptions options = OptionsOf(arguments, now.plan);
  const SingleChanges changes = FindSingleChanges(now, options);
  const double measured = report.costs.parts.period;
  const double unexplained = measured / changes.step_time.value - 1;
  std::vector<Plan> plans = Mapped<Plan>(changes.best, &SingleChange::plan);
  report.better = FindBetter(now, options, changes);
  if (report.better) {
    plans.push_back(report.better->file.plan);
  }
  const std::optional<Profile> none;
  std::vector<double> bands =
      GainBands(now, plans, unexplained, report.is_corrected ? report.calibration->other : none);
  if (report.better) {
    BetterPlan& better = *report.better;
    better.band = bands.back();
    better.step_time = Seconds(measured * (1 - better.gain));
    better.changes = PlanChanges(now, better.file);
    MakePatch(EmitterOf(arguments, now.plan.dialect), now, better);
    bands.pop_back();
  }
  report.advice = AdviceOf(report.costs, now.plan, changes, bands);
}

int SayNoRun(const Arguments& arguments, const RunMatch& match) {
  nlohmann::ordered_json json = ReportHead("shardwright-advice");
  json["match"] = nlohmann::ordered_json::parse(MatchJson(match));
  json["notes"] = {match.Verdict()};
  arguments.Print(arguments.IsJson() ? json.dump(2) + "\n" : MatchText(match));
  return kExitNo;
}

AdviseReport ReportOf(const Traced& traced) {
  AdviseReport report;
  report.has_plan = traced.has_plan;
  const TracedRun& run = traced.run;
  if (run.recordings.empty()) {
    report.costs = CostsOf(run.program, run.trace, traced.period);
  } else {
    report.costs = CostsOf(run.recordings);
    report.notes = run.recordings.front().notes;
  }
  report.title = traced.has_plan ? TitleOf(run.file)
                                 : run.name + ": " + std::to_string(report.costs.units.size()) +
                                       " units, no plan";
  if (!traced.has_plan) {
    report.notes.emplace_back(
        "with --plan each change and the best plan are simulated: import-run makes one of a job's "
        "settings, shardwright.describe of its module");
  }
  return report;
}

}  // namespace

int AdviseCommand(const Arguments& arguments) {
  const Traced traced = ReadTraced(arguments);
  if (!traced.has_plan) {
    for (const char* flag : {"--fix", "--to", "--output", "--patch"}) {
      if (arguments.Get(flag).is_given()) {
        throw UsageError(std::string(flag) + " needs --plan: " + traced.run.name +
                         " does not say which plan it ran");
      }
    }
  }
  const RunMatch match = traced.has_plan ? MatchOf(traced.run) : RunMatch();
  if (!match.IsRun()) {
    return SayNoRun(arguments, match);
  }
  if (const std::string found = ContradictionsOf(traced.run); !found.empty()) {
    arguments.Print("The trace contradicts its program.\n" + found);
    return kExitNo;
  }
  AdviseReport report = ReportOf(traced);
  if (traced.has_plan) {
    if (!traced.run.recordings.empty()) {
      report.match = match;
    }
    AdviseWithPlan(arguments, traced, report);
  } else {
    report.advice = AdviceOf(report.costs, Dialect::kFsdp2);
  }
  report.has_fsdp_problem = HasFsdpProblem(report.costs, report.advice);
  const std::string output = arguments.Get("--output").text;
  const std::string patch = arguments.Get("--patch").text;
  for (const std::string& file : {output, patch}) {
    if (!file.empty()) {
      CheckWritable(file);  // neither is written where the other one cannot be
    }
  }
  if (report.better && !output.empty()) {
    WriteFileAtomically(output, PlanFileJson(report.better->file));
  }
  if (report.better && !patch.empty()) {
    WriteFileAtomically(patch, report.better->patch);
  }
  arguments.Print(arguments.IsJson() ? AdviseJson(report) : AdviseText(report));
  return kExitOk;
}

}  // namespace shardwright
