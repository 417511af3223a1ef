#include "cli/calibrate_calls.h"

#include <nlohmann/json.hpp>

#include "analysis/calibrate_calls.h"
#include "cli/flow.h"
#include "cli/table.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/text.h"
#include "topologies/gpu_names.h"
#include "topologies/profile_targets.h"
#include "traces/measured_file.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;
using Align = Table::Align;

constexpr std::size_t kMostUntold = 8;  // that are listed

// --cluster, or what the traces say, which must be one GPU.
GpuSpec GpuOf(const Arguments& arguments, const std::vector<TimedCalls>& traces) {
  if (const Flag cluster = arguments.Get("--cluster"); cluster.is_given()) {
    return LoadCluster(cluster.text, 0, 0).gpu;
  }
  std::string name;
  for (const TimedCalls& trace : traces) {
    const std::string found = trace.on_device ? GpuOfProduct(trace.device) : "host";
    if (found.empty()) {
      throw UsageError("--cluster: " + trace.file + " does not say on which GPU of the catalog " +
                       "it ran" +
                       (trace.device.empty() ? "" : " (\"" + PrintableLine(trace.device) + "\")"));
    }
    if (!name.empty() && name != found) {
      throw InputError(trace.file, "a run on " + found, "one on " + name + ", as the files before");
    }
    name = found;
  }
  return LoadCluster(name == "host" ? name : name + " x1", 0, 0).gpu;
}

// What other kinds of measurements need, and whose numbers these would not be.
void CheckFlags(const Arguments& arguments) {
  for (const char* name : {"--op", "--nodes", "--ranks"}) {
    if (arguments.Get(name).is_given()) {
      throw UsageError(std::string(name) + " says nothing of single kernels");
    }
  }
  if (arguments.Has("--even-if-worse")) {
    throw UsageError("--even-if-worse: of single kernels each number is judged by itself");
  }
}

void CheckStart(const Profile& start, const GpuSpec& gpu) {
  const std::string& of = start.architecture;  // empty: of any GPU
  const std::vector<std::string> targets = ProfileTargets(gpu);
  if (!of.empty() && !IsIn(targets, of)) {
    throw InputError("--profile", start.name + ", which is of " + of + " GPUs",
                     "one of " + gpu.name + " (" + gpu.architecture + "), where the trace ran");
  }
}

std::string Share(Seconds part, Seconds whole) {
  return whole > Seconds(0) ? Percent(part.value / whole.value) : "-";
}

Seconds Covered(const CallCalibration& result) {
  return Summed<Seconds>(result.coverage, &CallCoverage::time);
}

std::string NumbersText(const CallCalibration& result) {
  Table table({Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight,
               Align::kRight, Align::kLeft});
  table.Row({"number of the profile", "before", "after", "shapes", "error before", "after", ""});
  for (const CallNumber& row : result.numbers) {
    table.Row({row.field, Fixed(row.before, "%.4g"), Fixed(row.after, "%.4g"),
               std::to_string(row.fitted) + " + " + std::to_string(row.held),
               Percent(row.error_before), Percent(row.error_after),
               row.is_kept ? "" : "not kept: no better for the other half"});
  }
  return table.Text() +
         "Fitted to every second shape; errors are medians over the others, where there are any.\n";
}

std::string CoverageText(const CallCalibration& result) {
  Table covered(
      {Align::kLeft, Align::kRight, Align::kRight, Align::kRight, Align::kRight, Align::kRight});
  covered.Row({"calls with shapes", "calls", "shapes", "of all time", "error before", "after"});
  for (const CallCoverage& row : result.coverage) {
    covered.Row({row.kind, std::to_string(row.calls), std::to_string(row.shapes),
                 Share(row.time, result.total), Percent(row.error_before),
                 Percent(row.error_after)});
  }
  std::string text = "\nCovered: " + Share(Covered(result), result.total) + " of " +
                     Format(result.total) + " of work beside collectives\n" + covered.Text();
  if (!result.untold.empty()) {
    Table untold({Align::kLeft, Align::kRight});
    untold.Row({"not covered", "of all time"});
    for (std::size_t i = 0; i < std::min(kMostUntold, result.untold.size()); ++i) {
      untold.Row({PrintableLine(result.untold[i].first.substr(0, 60)),
                  Share(result.untold[i].second, result.total)});
    }
    text += "\n" + untold.Text();
  }
  return text;
}

std::string ReportJson(const CallCalibration& result) {
  Json json = ReportHead("shardwright-calibration");
  json["profile"] = result.profile.name;
  json["numbers"] = Mapped<Json>(result.numbers, [&](const CallNumber& row) -> Json {
    return {{"field", row.field},
            {"unit", "fraction"},
            {"before", row.before},
            {"after", row.is_kept ? row.after : row.before},
            {"spread", row.is_kept ? row.error_after : row.error_before},
            {"op_shapes", row.fitted + row.held},
            {"fitted", row.after},
            {"other_half_before", row.error_before},
            {"other_half_after", row.error_after},
            {"kept", row.is_kept}};
  });
  json["coverage"] = Mapped<Json>(result.coverage, [&](const CallCoverage& row) -> Json {
    return {{"kind", row.kind},
            {"calls", row.calls},
            {"shapes", row.shapes},
            {"time_s", row.time.value},
            {"error_before", row.error_before},
            {"error_after", row.error_after}};
  });
  json["kernels_s"] = result.total.value;
  json["not_covered"] = Json::array();
  for (const auto& [name, time] : result.untold) {
    json["not_covered"].push_back({{"name", name}, {"time_s", time.value}});
  }
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

bool AreKineto(const std::vector<std::string>& files) {
  return !files.empty() && AllOf(files, [](const std::string& file) {
    return DetectMeasured(file) == MeasuredKind::kKineto;
  });
}

int CalibrateByCalls(const Arguments& arguments, const std::vector<std::string>& files,
                     const std::string& date) {
  CheckFlags(arguments);
  std::vector<TimedCalls> traces =
      Mapped<TimedCalls>(files, [&](const std::string& file) { return ReadTimedCalls(file); });
  const std::string source = "shardwright calibrate over kernels of " + Listed(files);
  const GpuSpec gpu = GpuOf(arguments, traces);
  Profile start = DefaultProfile(gpu, UsualKernelSet(gpu));
  arguments.Set("--profile", start, [](const Flag& flag) { return LoadProfile(flag.text); });
  CheckStart(start, gpu);
  CallCalibration result = CalibrateCalls(
      traces, gpu, start, {NumberKind::kMeasured, source + "; " + gpu.full_name, date});
  const bool is_better = AnyOf(result.numbers, &CallNumber::is_kept);
  result.profile.name = start.name + "-calibrated";
  arguments.SetText("--name", result.profile.name);
  result.profile.description = "Fitted by shardwright calibrate to kernels, from " + start.name;
  const std::string output = arguments.Get("--output").text;
  if (is_better) {
    WriteFileAtomically(output, ProfileJson(result.profile));
  }
  if (output != "-" || !is_better) {
    arguments.Print(arguments.IsJson()
                        ? ReportJson(result)
                        : (is_better ? "Profile " + PrintableLine(result.profile.name)
                                     : std::string("No profile was written: no "
                                                   "number would be better")) +
                              "\n\n" + NumbersText(result) + CoverageText(result));
  }
  return is_better ? kExitOk : kExitNo;
}

}  // namespace shardwright
