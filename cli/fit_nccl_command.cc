#include <array>
#include <string>
#include <vector>

#include "analysis/fit_nccl.h"
#include "analysis/nccl_sweep.h"
#include "cli/command.h"
#include "cli/nccl_print.h"
#include "core/json.h"
#include "topologies/profile.h"

namespace shardwright {
namespace {

constexpr const char* kFitNcclAbout =
    R"(Fits the network numbers of a profile to published collective sweeps.

Only all-gathers and reduce-scatters of 64 KiB to 16 GiB are used; with --all-reduce, the all-reduces
and all-to-alls of all sizes, over the shipped numbers of gathers.

Examples:
  shardwright fit-nccl bench/published/nccl_measured.csv --left-out
  shardwright fit-nccl sweep.csv --extends h100-torch-eager --date 2026-11-21 -o mine.json)";

constexpr std::array<PositionalRow, 1> kFitNcclPositionals = {
    {{"SWEEP", "table of collective times (CSV)", "fit-nccl needs a table of collectives", false,
      FileRole::kRead}}};

constexpr std::array<FlagRow, 3> kFitNcclFlags = {{
    {"--output,-o", "FILE", "write a profile with the fitted numbers", FileRole::kWrite},
    {"--extends", "NAME|FILE", "profile whose other numbers it has (default generic)",
     FileRole::kRead},
    {"--date", "YYYY-MM-DD", "when the sweep was measured or read; required with --output"},
}};

constexpr std::array<SwitchRow, 2> kFitNcclSwitches = {{
    {"--all-reduce", "fit what all-reduces and all-to-alls add to gathers"},
    {"--left-out",
     "also fit with each fabric left out in turn, and predict it from its link rates"},
}};

// The fitted numbers over those of `base`.
std::string FittedProfile(const NetworkFit& fit, const std::string& base, const Origin& origin) {
  Profile profile = LoadProfile(base);
  ApplyFit(fit, origin, profile);
  profile.name += "-fitted";
  return ProfileJson(profile);
}

int RunFitNccl(const Arguments& arguments) {
  const std::string file = arguments.Get("SWEEP").text;
  std::string base = "generic";
  Origin origin{NumberKind::kFitted, "shardwright fit-nccl " + file, ""};
  const std::string output = arguments.Get("--output").text;
  arguments.SetText("--extends", base);
  arguments.Set("--date", origin.date, ReadDate);
  if (!output.empty()) {
    arguments.Require("--date");
  }
  const std::vector<SweepRow> rows = ReadSweep(file);
  const NetworkFit fit = arguments.Has("--all-reduce")
                             ? FitAllReduce(rows)
                             : FitNetwork(rows, arguments.Has("--left-out"));
  if (!output.empty()) {
    WriteFileAtomically(output, FittedProfile(fit, base, origin));
    if (output == "-") {
      return kExitOk;
    }
  }
  arguments.Print(arguments.IsJson() ? NetworkFitJson(fit) : NetworkFitText(fit));
  return kExitOk;
}

}  // namespace

extern const Command kFitNcclCommand;
const Command kFitNcclCommand = {"fit-nccl",    kFitNcclAbout,    kFitNcclPositionals,
                                 kFitNcclFlags, kFitNcclSwitches, RunFitNccl};

}  // namespace shardwright
