#include <array>
#include <optional>
#include <utility>

#include <nlohmann/json.hpp>

#include "analysis/calibrate.h"
#include "analysis/calibrate_steps.h"
#include "analysis/run_match.h"
#include "cli/calibrate_calls.h"
#include "cli/command.h"
#include "cli/comparison_print.h"
#include "cli/device_calibration.h"
#include "cli/device_flags.h"
#include "cli/flow.h"
#include "cli/rank_facts.h"
#include "cli/recordings.h"
#include "cli/run_list.h"
#include "cli/run_processes.h"
#include "cli/table.h"
#include "cli/traced_run.h"
#include "core/cores.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "executor/host/device.h"
#include "executor/host/launch.h"
#include "planner/evaluate.h"
#include "traces/measured_file.h"
#include "traces/nccl_tests.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

// All recordings together are one run of the plan.
TracedRun ReadForeignTraces(const Arguments& arguments, const std::vector<std::string>& files) {
  if (!arguments.Get("--plan").is_given()) {
    throw UsageError("--plan: " + files.front() + " does not say which plan it ran");
  }
  TracedRun run{
      files.front(), ReadPlanFile(arguments.Get("--plan").text, arguments.streams), {}, {}};
  run.program = LowerAndVerify(run.file);
  run.recordings = ReadRecordings(files);
  return run;
}

// 0: as many as the cluster says.
std::int64_t NodesOf(const Arguments& arguments) {
  constexpr std::int64_t kMostNodes = 1 << 20;
  std::int64_t nodes = 0;
  arguments.SetCount("--nodes", kMostNodes, nodes);
  return nodes;
}

// One shape per row, in the group of all ranks.
TracedRun ReadCollectives(const Arguments& arguments, const std::string& file) {
  std::optional<std::string> op;
  arguments.Set("--op", op, [](const Flag& flag) { return flag.text; });
  const CollectiveTest test = ReadCollectiveTest(file, op);
  TracedRun run{file, {}, {}, {}};
  if (!arguments.Get("--cluster").is_given()) {
    throw UsageError("--cluster: " + file + " does not say where it was measured");
  }
  run.file.cluster = LoadCluster(arguments.Get("--cluster").text, NodesOf(arguments), 0);
  run.file.profile = DefaultProfile(run.file.cluster.gpu, "torch-eager");
  const std::int64_t ranks = run.file.cluster.RankCount();
  if (test.ranks > 0 && test.ranks != ranks) {
    throw InputError(file, std::to_string(test.ranks) + " ranks",
                     "the " + std::to_string(ranks) + " of --cluster", "see --nodes");
  }
  run.program.groups.push_back({"all", ranks, 1});
  for (const CollectiveTiming& row : test.rows) {
    OpShape shape;
    shape.code = test.op;
    shape.dtype = row.dtype;
    shape.group = GroupId(0);
    shape.bytes = row.size;
    run.shapes.push_back({0, ShapeId(run.program.shapes.size()), row.time.value, 0, 1});
    run.program.shapes.push_back(shape);
  }
  return run;
}

std::vector<TracedRun> ReadTraces(const Arguments& arguments,
                                  const std::vector<std::string>& files) {
  std::vector<TracedRun> runs;
  std::vector<std::string> foreign;
  for (const std::string& file : TraceFilesOf(files)) {
    switch (DetectMeasured(file)) {
      case MeasuredKind::kTrace:
        runs.push_back(ReadOwnTrace(file));
        break;
      case MeasuredKind::kKineto:
      case MeasuredKind::kNsight:
        foreign.push_back(file);
        break;
      case MeasuredKind::kNcclText:
      case MeasuredKind::kNcclJson:
        runs.push_back(ReadCollectives(arguments, file));
        break;
      case MeasuredKind::kSnapshot:
        throw InputError(file, "a memory snapshot", "something with times",
                         "shardwright inspect-trace shows snapshots");
    }
  }
  if (!foreign.empty()) {
    runs.push_back(ReadForeignTraces(arguments, foreign));
  }
  return runs;
}

// Of lists of runs; nothing where the files are something else.
std::optional<std::vector<MeasuredRun>> ReadStepTimes(const std::vector<std::string>& files) {
  if (NoneOf(files, IsRunList)) {
    return std::nullopt;
  }
  std::vector<MeasuredRun> runs;
  for (const std::string& file : files) {
    if (!IsRunList(file)) {
      throw UsageError("step times and traces do not mix: " + file + " is no list of runs");
    }
    for (MeasuredRun& run : ReadRuns(ReadRunList(file))) {
      runs.push_back(std::move(run));
    }
  }
  if (runs.empty()) {
    throw InputError(files.front(), "no run", "a run and its step time");
  }
  return runs;
}

std::string Value(const CalibratedNumber& number, double value) {
  return number.is_time ? Format(Seconds(value)) : Fixed(value, "%.4g");
}

// Op by op the numbers may be right all the same.
constexpr const char* kWorseAdvice =
    "\nThe prices of ops were measured while something else held the step up: another job, or "
    "fewer "
    "cores than\nthe plan was made for. Measure again on a quiet machine, or give "
    "--even-if-worse.\n";

std::string RunsText(const CalibrationResult& result) {
  using Align = Table::Align;
  Table runs({Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight});
  runs.Row({"step time of", "measured", "before", "after", "off by"});
  for (const CalibratedRun& run : result.runs) {
    runs.Row({run.name, Format(run.measured), Format(run.before), Format(run.after),
              Percent(run.after.value / run.measured.value - 1)});
  }
  return result.runs.empty() ? std::string() : runs.Text();
}

Json RunsJson(const CalibrationResult& result) {
  return Mapped<Json>(result.runs, [&](const CalibratedRun& run) -> Json {
    return {{"name", run.name},
            {"measured_s", run.measured.value},
            {"before_s", run.before.value},
            {"after_s", run.after.value}};
  });
}

std::string ReportText(const CalibrationResult& result) {
  using Align = Table::Align;
  Table numbers({Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight});
  numbers.Row({"number of the profile", "before", "after", "error", "rows"});
  for (const CalibratedNumber& number : result.numbers) {
    numbers.Row({number.field, Value(number, number.before), Value(number, number.after),
                 Percent(number.spread), std::to_string(number.rows)});
  }
  std::string notes;
  for (const std::string& transport : result.of_one_size) {
    notes += "\nNote: " + OneSizeNote(transport) + ".\n";
  }
  return "Profile " + PrintableLine(result.profile.name) + "\n\n" + numbers.Text() + notes +
         (result.runs.empty() ? std::string() : "\n" + RunsText(result));
}

std::string ReportJson(const CalibrationResult& result) {
  Json json = ReportHead("shardwright-calibration");
  json["profile"] = result.profile.name;
  json["numbers"] = Mapped<Json>(result.numbers, [&](const CalibratedNumber& number) -> Json {
    return {{"field", number.field},   {"unit", number.is_time ? "s" : "fraction"},
            {"before", number.before}, {"after", number.after},
            {"spread", number.spread}, {"op_shapes", number.rows}};
  });
  json["of_one_size"] = result.of_one_size;
  json["runs"] = RunsJson(result);
  return json.dump(2) + "\n";
}

CalibrationDevice HostDeviceOf(const Arguments& arguments) {
  constexpr std::int64_t kMostRanks = 8;  // of the cluster "host"
  constexpr std::int64_t kUsualRanks = 4;
  CalibrationDevice device;
  device.large = true;
  device.ranks =
      std::clamp<std::int64_t>(static_cast<std::int64_t>(AvailableCores()), 1, kUsualRanks);
  arguments.SetCount("--ranks", kMostRanks, device.ranks);
  return device;
}

enum class Measured : std::uint8_t { kHost, kCuda, kTraces };

Measured WhatIsMeasured(const Arguments& arguments, const std::vector<std::string>& files) {
  static constexpr std::array<std::string_view, 2> kDevices = {"host", "cuda"};
  std::size_t device = kDevices.size();
  arguments.SetChoice("--device", kDevices, device);
  const bool has_device = device < kDevices.size();
  if (has_device == !files.empty()) {
    throw UsageError(has_device ? "traces and --device contradict each other"
                                : "calibrate needs traces, or --device host or cuda");
  }
  (void)NodesOf(arguments);
  (void)HostDeviceOf(arguments);  // wrong flags are found before wrong files
  if (device > 0 && arguments.Get("--ranks").is_given()) {
    throw UsageError("--ranks needs --device host");
  }
  return static_cast<Measured>(device);
}

// One process per GPU of the cluster, started here unless a launcher has; all of them but the first
// get no runs.
struct CudaRuns {
  std::vector<TracedRun> runs;
  int code = kExitOk;  // of the processes that were started here
};
CudaRuns RunOnCuda(const Arguments& arguments) {
  if (!arguments.Get("--cluster").is_given()) {
    throw UsageError("--device cuda needs --cluster, the GPUs of this machine and what joins them");
  }
  const std::string name = arguments.Get("--cluster").text;
  const std::int64_t nodes = NodesOf(arguments);
  const Cluster cluster = LoadCluster(name, nodes, 0);
  const Launch launch = LaunchOf(arguments);
  if (launch.size == 1 && cluster.RankCount() > 1) {
    return {{}, RunLocalProcesses(cluster.RankCount())};
  }
  CalibrationDevice device = CudaCalibration(name, nodes, LocalGpu(launch));
  const RunProcesses group(launch, cluster, HostOptions().set_up_timeout,
                           [&] { return FactsOf(arguments, {}); });
  device.processes = group.get();
  return {RunCalibrationPlans(device)};
}

// Where the numbers come from.
std::string SourceOf(const std::vector<TracedRun>& runs, Measured measured) {
  return "shardwright calibrate over " + Listed(runs, &TracedRun::name) + "; " +
         (measured == Measured::kHost ? MachineName() : runs.front().file.cluster.gpu.full_name);
}

int SayNoRun(const Arguments& arguments, const TracedRun& run, const RunMatch& match) {
  if (arguments.IsJson()) {
    Json json = ReportHead("shardwright-calibration");
    json.update({{"written", false},
                 {"reason", match.Verdict()},
                 {"match", Json::parse(MatchJson(match))}});
    arguments.Print(json.dump(2) + "\n");
  } else {
    arguments.Print("No profile was written: " + PrintableLine(run.name) +
                    " is not a run of the plan.\n\n" + MatchText(match));
  }
  return kExitNo;
}

// One profile is about one GPU type.
void CheckGpus(const std::vector<TracedRun>& runs) {
  const std::string& first = runs.front().file.cluster.gpu.name;
  for (const TracedRun& run : runs) {
    if (run.file.cluster.gpu.name != first) {
      throw InputError(run.name, "a run on " + run.file.cluster.gpu.name,
                       "one on " + first + ", as " + runs.front().name);
    }
  }
}

int WriteResult(const Arguments& arguments, CalibrationResult& result, const Profile& start) {
  const std::string output = arguments.Get("--output").text;
  result.profile.name = start.name + "-calibrated";
  arguments.SetText("--name", result.profile.name);
  result.profile.description = "Fitted by shardwright calibrate, from " + start.name;
  if (result.IsWorse() && !arguments.Has("--even-if-worse")) {
    const std::string reason = "it would predict the runs that it was fitted to worse than before";
    Json json = ReportHead("shardwright-calibration");
    json.update({{"written", false}, {"reason", reason}, {"runs", RunsJson(result)}});
    arguments.Print(arguments.IsJson() ? json.dump(2) + "\n"
                                       : "No profile was written: " + reason + ".\n\n" +
                                             RunsText(result) + kWorseAdvice);
    return kExitNo;
  }
  WriteFileAtomically(output, ProfileJson(result.profile));
  if (output != "-") {
    arguments.Print(arguments.IsJson() ? ReportJson(result) : ReportText(result));
  }
  return kExitOk;
}

int CalibrateByStepTimes(const Arguments& arguments, const std::vector<MeasuredRun>& runs,
                         const std::string& date) {
  const PlanFile& first = runs.front().plan;
  Profile start = DefaultProfile(first.cluster.gpu, first.kernels.name);
  arguments.Set("--profile", start, [](const Flag& flag) { return LoadProfile(flag.text); });
  const std::string source =
      "shardwright calibrate over the step times of " + Listed(runs, &MeasuredRun::id);
  CalibrationResult result = CalibrateSteps(runs, start, {NumberKind::kFitted, source, date});
  return WriteResult(arguments, result, start);
}

}  // namespace

int CalibrateCommand(const Arguments& arguments) {
  arguments.Require("--output");
  if (const Flag folder = arguments.Get("--profiles"); folder.is_given()) {
    ShipProfilesOf(folder.text);
  }
  const auto list = arguments.lists.find("TRACE");
  const std::vector<std::string> files =
      list == arguments.lists.end() ? std::vector<std::string>() : list->second;
  const Measured measured = WhatIsMeasured(arguments, files);
  std::string date = Today();
  arguments.Set("--date", date, ReadDate);
  if (const auto runs = ReadStepTimes(files)) {
    return CalibrateByStepTimes(arguments, *runs, date);
  }
  if (!arguments.Get("--plan").is_given() && measured == Measured::kTraces) {
    if (const std::vector<std::string> traces = TraceFilesOf(files); AreKineto(traces)) {
      return CalibrateByCalls(arguments, traces, date);
    }
  }
  std::vector<TracedRun> traced;
  if (measured == Measured::kCuda) {
    CudaRuns cuda = RunOnCuda(arguments);
    if (cuda.runs.empty()) {
      return cuda.code;
    }
    traced = std::move(cuda.runs);
  } else {
    traced = measured == Measured::kHost ? RunCalibrationPlans(HostDeviceOf(arguments))
                                         : ReadTraces(arguments, files);
  }
  CheckGpus(traced);
  for (const TracedRun& run : traced) {
    if (const RunMatch match = MatchOf(run); !match.IsRun()) {
      return SayNoRun(arguments, run, match);
    }
  }
  std::string found;
  for (const TracedRun& run : traced) {
    found += ContradictionsOf(run);
  }
  if (!found.empty()) {
    arguments.Print("No profile was written: traces contradict their programs.\n" + found);
    return kExitNo;
  }
  Profile start = traced.front().file.profile;
  arguments.Set("--profile", start, [](const Flag& flag) { return LoadProfile(flag.text); });
  Origin origin{NumberKind::kMeasured, SourceOf(traced, measured), date};
  std::vector<CalibrationRun> runs =
      Mapped<CalibrationRun>(traced, [&](const TracedRun& run) { return CalibrationRunOf(run); });
  CalibrationResult result = Calibrate(runs, start, origin);
  return WriteResult(arguments, result, start);
}

}  // namespace shardwright
