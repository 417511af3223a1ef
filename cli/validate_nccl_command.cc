#include <array>
#include <string>
#include <vector>

#include "analysis/fit_nccl.h"
#include "analysis/nccl_scale.h"
#include "analysis/nccl_sweep.h"
#include "analysis/validate_nccl.h"
#include "cli/command.h"
#include "cli/nccl_print.h"

namespace shardwright {
namespace {

constexpr const char* kValidateNcclAbout =
    R"(Predicts published collective sweeps (nccl-tests) and reports the errors.

Examples:
  shardwright validate-nccl bench/published/nccl_measured.csv
  shardwright validate-nccl bench/published/nccl_measured.csv --left-out
  shardwright validate-nccl bench/published/nccl_measured.csv --scale bench/published/nccl_simai_ratio.csv
  shardwright validate-nccl sweep.csv --profile my-profile.json --json

The columns of a table are described in bench/published/README.md.)";

constexpr std::array<PositionalRow, 1> kValidateNcclPositionals = {
    {{"SWEEP", "table of collective times (CSV)", "validate-nccl needs a table of collectives",
      false, FileRole::kRead}}};

constexpr std::array<FlagRow, 2> kValidateNcclFlags = {{
    {"--profile", "NAME|FILE", "profile for all rows (default: by GPU)", FileRole::kRead},
    {"--scale", "FILE", "table of efficiencies over many nodes, compared as well", FileRole::kRead},
}};

constexpr std::array<SwitchRow, 1> kValidateNcclSwitches = {{
    {"--left-out",
     "also fit with each fabric left out in turn, and predict it from its link rates"},
}};

int RunValidateNccl(const Arguments& arguments) {
  const std::vector<SweepRow> rows = ReadSweep(arguments.Get("SWEEP").text);
  std::string profile;
  arguments.SetText("--profile", profile);
  const PreparedSweep sweep = PrepareSweep(rows, profile);
  SweepOutput output;
  if (arguments.Has("--left-out")) {
    output.left_out = FitNetwork(rows, true).left_out;
  }
  if (const Flag scale = arguments.Get("--scale"); scale.is_given()) {
    output.scale = ReportScale(scale.text);
  }
  output.report = ReportSweep(sweep);
  arguments.Print(arguments.IsJson() ? SweepJson(sweep, output) : SweepText(output));
  return kExitOk;
}

}  // namespace

extern const Command kValidateNcclCommand;
const Command kValidateNcclCommand = {"validate-nccl",          kValidateNcclAbout,
                                      kValidateNcclPositionals, kValidateNcclFlags,
                                      kValidateNcclSwitches,    RunValidateNccl};

}  // namespace shardwright
