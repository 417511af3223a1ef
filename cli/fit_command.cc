#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/fit_runs.h"
#include "cli/command.h"
#include "cli/fit_print.h"
#include "cli/run_list.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/writable.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr const char* kFitAbout = R"(Fits the numbers of profiles to measured training runs.

Runs on one chip (A100 of 40 and of 80 GB) by one framework share all numbers but two. Every model
is also left out in turn and predicted by numbers that never saw it (in a group with one model:
every number of GPUs). With --one-per-gpu all kernel sets of a framework share one profile per GPU.

Examples:
  shardwright fit runs.json
  shardwright fit runs.json --date 2026-11-21 -o profiles/

The keys of a list of runs are described in docs/cli.md; bench/fit.py makes lists of published
tables.)";

constexpr std::array<PositionalRow, 1> kFitPositionals = {
    {{"RUNS", "list of measured runs (JSON)", "fit needs a list of measured runs", false,
      FileRole::kRead}}};

constexpr std::array<FlagRow, 6> kFitFlags = {{
    {"--output,-o", "FILE",
     "write the profile of the fitted stack; a folder (with a / at its end) for several",
     FileRole::kWriteWhen},
    {"--date", "YYYY-MM-DD", "when the runs were measured or read; required with --output"},
    {"--leave-out", "model|size|source|none",
     "what is left out in turn: models (default); models of a source that has others; sources"},
    {"--profiles", "FOLDER", "profiles to choose from (default: the shipped ones)",
     FileRole::kRead},
    {"--numbers", "LIST", "numbers to fit, at most 8, such as compute.gemm.bf16,host.step"},
    {"--own", "LIST", "those of them that each stack has for itself, at most 2"},
}};

constexpr std::array<SwitchRow, 1> kFitSwitches = {
    {{"--one-per-gpu",
      "one profile per GPU type for all kernel sets of a framework, which then differ by their "
      "kernels alone"}}};

void CheckOwn(const FitOptions& options) {
  const std::vector<std::string> fitted =
      options.numbers.empty() ? DefaultFitNumbers() : options.numbers;
  for (const std::string& number : options.own) {
    if (std::find(fitted.begin(), fitted.end(), number) == fitted.end()) {
      const std::string hint = DidYouMean(number, fitted);
      throw UsageError("--own: got \"" + number + "\", expected a number that is fitted" +
                       (hint.empty() ? "" : "; " + hint));
    }
  }
}

int RunFitCommand(const Arguments& arguments) {
  const std::string file = arguments.Get("RUNS").text;
  if (const Flag folder = arguments.Get("--profiles"); folder.is_given()) {
    ShipProfilesOf(folder.text);
  }
  FitOptions options;
  arguments.Set("--numbers", options.numbers, ReadList);
  arguments.Set("--own", options.own, ReadList);
  if (options.numbers.size() > 8) {
    throw UsageError("--numbers: got " + std::to_string(options.numbers.size()) +
                     ", expected at most 8");
  }
  if (options.own.size() > 2) {
    throw UsageError("--own: got " + std::to_string(options.own.size()) + ", expected at most 2");
  }
  CheckOwn(options);
  options.one_per_gpu = arguments.Has("--one-per-gpu");
  static constexpr std::array<std::string_view, 4> kLeaveOut = {"none", "model", "size", "source"};
  arguments.SetChoice("--leave-out", kLeaveOut, options.leave_out);
  options.progress = [](const std::string& line) { Say(line); };
  const std::string output = arguments.Get("--output").text;
  std::string date;
  arguments.Set("--date", date, ReadDate);
  if (!output.empty()) {
    arguments.Require("--date");
  }
  const RunList list = ReadRunList(file);
  const std::vector<MeasuredRun> runs = ReadRuns(list);
  RunFit fit = FitRuns(runs, options);
  fit.skipped += list.skipped;
  if (!output.empty()) {
    const std::string source = "shardwright fit " + list.name;
    if (output.ends_with('/')) {
      std::vector<OutputFile> files;
      for (const FittedStack& stack : fit.stacks) {
        files.push_back({output + stack.gpu + "-" + stack.kernel_set + ".json",
                         FittedProfileJson(stack, source, date), /*is_in_folder=*/true});
      }
      WriteFilesAtomically(files);
    } else {
      if (fit.stacks.size() > 1) {
        throw UsageError(
            "--output: several stacks were fitted; give a folder, with a / at its end");
      }
      WriteFileAtomically(output, FittedProfileJson(fit.stacks[0], source, date));
    }
    if (output == "-") {
      return kExitOk;
    }
  }
  arguments.Print(arguments.IsJson() ? RunFitJson(fit) : RunFitText(fit));
  return kExitOk;
}

}  // namespace

extern const Command kFitCommand;
const Command kFitCommand = {"fit",     kFitAbout,    kFitPositionals,
                             kFitFlags, kFitSwitches, RunFitCommand};

}  // namespace shardwright
