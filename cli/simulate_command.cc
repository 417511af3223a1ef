#include <array>
#include <utility>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/lengths_flag.h"
#include "cli/pipeline_print.h"
#include "cli/prediction.h"
#include "cli/rollout_print.h"
#include "cli/straggler_flags.h"
#include "cli/terminal.h"
#include "core/json.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"
#include "topologies/scale_links.h"
#include "traces/chrome_write.h"

namespace shardwright {
namespace {

enum class TraceProfile : std::uint8_t { kPerfetto, kHta };

struct SimulateFlagValues {
  std::string trace;  // empty: none
  TraceProfile trace_profile = TraceProfile::kPerfetto;
  bool contention = true;
};

SimulateFlagValues ReadSimulateFlags(const Arguments& arguments) {
  SimulateFlagValues flags;
  static constexpr std::array<std::string_view, 2> kTraceProfiles = {"perfetto", "hta"};
  arguments.SetText("--trace", flags.trace);
  arguments.SetChoice("--trace-profile", kTraceProfiles, flags.trace_profile);
  arguments.Set("--contention", flags.contention, ReadSwitch);
  if (arguments.IsJson() && flags.trace == "-") {
    throw UsageError("--json and --trace - both want standard output");
  }
  return flags;
}

// The report, with the verdict in colour where there are colours.
void PrintText(const Arguments& arguments, const std::string& text, bool fits) {
  // The verdict: the last line where it fits, the second one where it does not.
  const std::size_t begin = fits ? text.rfind('\n', text.size() - 2) + 1 : text.find('\n') + 1;
  const std::size_t end = text.find('\n', begin);
  arguments.Print(text.substr(0, begin));
  {
    const Inked inked(fits ? Ink::kGood : Ink::kBad, StandardOutput());
    arguments.Print(text.substr(begin, end - begin));
  }
  arguments.Print(text.substr(end));
}

// Of many micro-batches told from a few, unless `is_whole`: then with a trace.
AccountedStep SimulateAndCheck(const PlanFile& file, const SimulateFlagValues& flags, bool is_whole,
                               PlanPrograms& programs) {
  const Program& program =
      is_whole ? programs.With(programs.micro_batch_count()) : programs.Largest();
  CheckLegal(program);
  SimulateOptions options = SimulateOptionsOf(file, program);
  options.contention = flags.contention;
  options.trace = true;
  Simulator simulator(file.cluster, file.profile);
  if (!is_whole) {
    return AccountForPlan(simulator, programs, options, SumsOf(file));
  }
  SimulationResult result = simulator.Run(program, options);
  StepAccount account = AccountFor(program, result, SumsOf(file));
  return {std::move(result), std::move(account)};
}

}  // namespace

int SimulateCommand(const Arguments& arguments) {
  const SimulateFlagValues flags = ReadSimulateFlags(arguments);
  const StragglerFlags stragglers = ReadStragglerFlags(arguments);
  PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  for (const auto& [level, factor] : stragglers.slow_links) {
    ScaleLinks(file.cluster, level, 1.0 / factor, "--slow-link");
  }
  if (file.plan.pipeline_size > 1) {
    return SimulatePipeline(arguments, file, flags.contention, flags.trace);
  }
  if (const Flag allocator = arguments.Get("--allocator"); allocator.is_given()) {
    CheckAllocatorFlag(arguments, file.plan);
    file.job.allocator = ReadAllocator(allocator);
  }
  WarnOf(file);
  const bool is_whole = arguments.Has("--exact") || !flags.trace.empty() || stragglers.is_sampled;
  PlanPrograms programs({file, file.plan});
  const auto& [result, account] = SimulateAndCheck(file, flags, is_whole, programs);
  const Program& program = programs.Largest();
  Prediction prediction = Predict(file, result, account);
  if (stragglers.is_sampled) {
    prediction.distribution = SampleSteps(file, program, result, stragglers.jitter);
  }
  if (!prediction.has_dtype) {
    Warn(NoMatrixUnits(file.cluster.gpu));
  }
  if (prediction.host_limit == Bytes(0) && file.plan.offload != Offload()) {
    Warn("cluster " + file.cluster.name + " has no host memory given, so that of " +
         Format(prediction.host_peak) + " per node is not checked");
  }
  if (!flags.trace.empty()) {
    ChromeOptions chrome;
    chrome.plan = PlanFileJson(file);
    chrome.step_time = result.step_time;
    chrome.profile =
        flags.trace_profile == TraceProfile::kHta ? ChromeProfile::kHta : ChromeProfile::kPerfetto;
    WriteChromeTrace(program, result.trace, chrome, flags.trace);
  }
  if (arguments.IsJson()) {
    arguments.Print(WithLengths(arguments, file,
                                WithPhases(arguments, file, prediction.step_time,
                                           PredictionJson(file, program, result, prediction))));
  } else if (flags.trace != "-") {  // then standard output is the trace and nothing else
    PrintText(arguments, PredictionText(file, program, result, prediction),
              prediction.misfits.empty());
    arguments.Print(
        WithLengths(arguments, file, WithPhases(arguments, file, prediction.step_time, "")));
  }
  return prediction.misfits.empty() ? kExitOk : kExitNo;
}

}  // namespace shardwright
