#include <array>
#include <optional>
#include <vector>

#include "analysis/measured_run.h"
#include "analysis/validate.h"
#include "cli/command.h"
#include "cli/validation_print.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr const char* kValidateAbout = R"(Predicts published training runs and reports the errors.

Examples:
  shardwright validate bench/published/measured_runs.csv
  shardwright validate bench/published/measured_runs.csv --oom bench/published/oom_runs.csv --json
  shardwright validate runs.csv --tier A,B --profile my-profile.json

The columns of a table are described in bench/published/README.md.)";

constexpr std::array<PositionalRow, 1> kValidatePositionals = {
    {{"RUNS", "table of measured runs (CSV)", "validate needs a table of measured runs", false,
      FileRole::kRead}}};

constexpr std::array<SwitchRow, 1> kValidateSwitches = {
    {{"--bands", "also the uncertainty of every step time, by the spreads of the profile"}}};

constexpr std::array<FlagRow, 4> kValidateFlags = {{
    {"--oom", "FILE", "table of runs that fit or ran out of memory", FileRole::kRead},
    {"--profile", "NAME|FILE", "profile for all rows (default auto: by GPU and kernel set)",
     FileRole::kRead},
    {"--profiles", "FOLDER", "profiles to choose from (default: the shipped ones)",
     FileRole::kRead},
    {"--tier", "LIST", "rows to use, by their column tier (default A; rows without one count)"},
}};

int RunValidate(const Arguments& arguments) {
  if (const Flag folder = arguments.Get("--profiles"); folder.is_given()) {
    ShipProfilesOf(folder.text);
  }
  ValidateOptions options;
  arguments.SetText("--profile", options.profile);
  options.bands = arguments.Has("--bands");
  arguments.Set("--tier", options.tiers, ReadList);
  const std::vector<MeasuredRun> runs = ReadMeasuredRuns(arguments.Get("RUNS").text);
  const Flag oom = arguments.Get("--oom");
  std::vector<MeasuredRun> outcomes;
  if (oom.is_given()) {
    outcomes = ReadMeasuredRuns(oom.text);
  }
  ValidationOutput output{.report = Validate(runs, options), .outcomes = std::nullopt};
  if (oom.is_given()) {
    output.outcomes = ValidateOutcomes(outcomes, runs, options);
  }
  arguments.Print(arguments.IsJson() ? ValidationJson(output) : ValidationText(output));
  return kExitOk;
}

}  // namespace

extern const Command kValidateCommand;
const Command kValidateCommand = {"validate",     kValidateAbout,    kValidatePositionals,
                                  kValidateFlags, kValidateSwitches, RunValidate};

}  // namespace shardwright
