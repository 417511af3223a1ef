#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/fit_runs.h"
#include "analysis/measured_run.h"
#include "cli/command.h"
#include "cli/fit_print.h"
#include "core/error.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/writable.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr const char* kFitAbout = R"(Fits the numbers of profiles to published training runs.

Runs on one chip (A100 of 40 and of 80 GB) by one framework share all numbers but two. Every model
is also left out in turn and predicted by numbers that never saw it (in a group with one model:
every number of GPUs). With --one-per-gpu all kernel sets of a framework share one profile per GPU.

Examples:
  shardwright fit bench/published/measured_runs.csv --source llmfoundry
  shardwright fit runs.csv --gpu h100-80 --kernel-set composer-2024 --date 2026-11-21 -o mine.json)";

constexpr std::array<PositionalRow, 1> kFitPositionals = {
    {{"RUNS", "table of measured runs (CSV)", "fit needs a table of measured runs", false,
      FileRole::kRead}}};

constexpr std::array<FlagRow, 11> kFitFlags = {{
    {"--output,-o", "FILE",
     "write the profile of one fitted stack; a folder (with a / at its end) for all",
     FileRole::kWriteWhen},
    {"--date", "YYYY-MM-DD", "when the table was made or read; required with --output"},
    {"--gpu", "NAME", "GPU type of the stack to write, where several were fitted"},
    {"--kernel-set", "NAME",
     "kernel set of the stack to write, likewise (with --one-per-gpu the framework)"},
    {"--source", "LIST", "fit rows of these sources only (ids up to the first '-')"},
    {"--gpu-class", "LIST", "of these GPUs only: parts of the column gpu_class, such as A100,H100"},
    {"--tier", "LIST", "rows to use, by their column tier (default A; rows without one count)"},
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

// Which rows are fitted; empty: all.
struct RowChoice {
  std::vector<std::string> sources;
  std::vector<std::string> gpus;  // parts of MeasuredRun::gpu_class
};

std::vector<MeasuredRun> Select(const std::vector<MeasuredRun>& runs, const RowChoice& choice) {
  std::vector<MeasuredRun> selected;
  for (const MeasuredRun& run : runs) {
    const bool has_source = choice.sources.empty() ||
                            std::find(choice.sources.begin(), choice.sources.end(), run.Source()) !=
                                choice.sources.end();
    const bool has_gpu =
        choice.gpus.empty() ||
        std::any_of(choice.gpus.begin(), choice.gpus.end(), [&](const std::string& part) {
          return run.gpu_class.find(part) != std::string::npos;
        });
    if (has_source && has_gpu) {
      selected.push_back(run);
    }
  }
  return selected;
}

// The one fitted stack that the flags name.
const FittedStack& Chosen(const RunFit& fit, const std::string& gpu,
                          const std::string& kernel_set) {
  const FittedStack* chosen = nullptr;
  std::string names;
  for (const FittedStack& stack : fit.stacks) {
    names +=
        (names.empty() ? "" : "; ") + ("--gpu " + stack.gpu) + " --kernel-set " + stack.kernel_set;
    if ((gpu.empty() || stack.gpu == gpu) &&
        (kernel_set.empty() || stack.kernel_set == kernel_set)) {
      if (chosen != nullptr) {
        throw UsageError("--output: several stacks were fitted, choose one: " + names);
      }
      chosen = &stack;
    }
  }
  if (chosen == nullptr) {
    throw InputError("--output: no such stack was fitted, choose one: " + names);
  }
  return *chosen;
}

// " --source a,b", or nothing.
std::string FlagText(const std::string& flag, const std::vector<std::string>& values) {
  std::string text;
  for (const std::string& value : values) {
    text += (text.empty() ? ' ' + flag + ' ' : ",") + value;
  }
  return text;
}

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
  RowChoice choice;
  arguments.Set("--source", choice.sources, ReadList);
  arguments.Set("--gpu-class", choice.gpus, ReadList);
  FitOptions options;
  arguments.Set("--tier", options.tiers, ReadList);
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
  std::string gpu;
  std::string kernel_set;
  arguments.SetText("--gpu", gpu);
  arguments.SetText("--kernel-set", kernel_set);
  arguments.Set("--date", date, ReadDate);
  if (!output.empty()) {
    arguments.Require("--date");
  }
  const RunFit fit = FitRuns(Select(ReadMeasuredRuns(file), choice), options);
  if (!output.empty()) {
    const std::string source = "shardwright fit " + file + FlagText("--source", choice.sources) +
                               FlagText("--gpu-class", choice.gpus);
    if (output.ends_with('/')) {
      std::vector<OutputFile> files;
      for (const FittedStack& stack : fit.stacks) {
        files.push_back({output + stack.gpu + "-" + stack.kernel_set + ".json",
                         FittedProfileJson(stack, source, date), /*is_in_folder=*/true});
      }
      WriteFilesAtomically(files);
    } else {
      WriteFileAtomically(output, FittedProfileJson(Chosen(fit, gpu, kernel_set), source, date));
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
