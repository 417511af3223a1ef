#include <array>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "analysis/validate_kernels.h"
#include "cli/command.h"
#include "cli/table.h"
#include "core/printable.h"

namespace shardwright {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kValidateKernelsAbout =
    R"(Predicts measured times of single GPU kernels and reports the errors.

Examples:
  shardwright validate-kernels kernels.csv
  shardwright validate-kernels kernels.csv --json
  shardwright validate-kernels kernels.csv --profile my-profile.json

The columns of a table are described in docs/cli.md.)";

constexpr std::array<PositionalRow, 1> kValidateKernelsPositionals = {
    {{"KERNELS", "table of kernel times (CSV)", "validate-kernels needs a table of kernel times",
      false, FileRole::kRead}}};

constexpr std::array<FlagRow, 1> kValidateKernelsFlags = {{
    {"--profile", "NAME|FILE", "profile for all rows (default: by GPU and library)",
     FileRole::kRead},
}};

std::string KernelReportText(const KernelReport& report) {
  using enum Table::Align;
  Table table({kLeft, kLeft, kLeft, kRight, kRight, kRight, kRight, kRight});
  table.Row({"GPU", "library", "op", "rows", "mean", "median", "p90", "bias"});
  for (const KernelRowGroup& group : report.groups) {
    table.Row({group.gpu, PrintableLine(group.stack), PrintableLine(group.op),
               std::to_string(group.errors.count), Percent(group.errors.mean),
               Percent(group.errors.median), Percent(group.errors.p90),
               SignedPercent(group.errors.bias)});
  }
  std::string text = table.Text();
  if (!report.skipped.empty()) {
    Table skipped({kRight, kLeft});
    skipped.Row({"rows", "not priced"});
    for (const SkippedKernelRows& rows : report.skipped) {
      skipped.Row({std::to_string(rows.rows), PrintableLine(rows.reason)});
    }
    text += '\n' + skipped.Text();
  }
  return text;
}

std::string KernelReportJson(const KernelReport& report) {
  Json json = {{"schema", "shardwright-kernel-validation"},
               {"schema_version", 1},
               {"groups", Json::array()},
               {"skipped", Json::array()},
               {"rows", Json::array()}};
  for (const KernelRowGroup& group : report.groups) {
    json["groups"].push_back({{"gpu", group.gpu},
                              {"stack", group.stack},
                              {"op", group.op},
                              {"n", group.errors.count},
                              {"mean_abs", group.errors.mean},
                              {"median_abs", group.errors.median},
                              {"p90_abs", group.errors.p90},
                              {"bias", group.errors.bias}});
  }
  for (const SkippedKernelRows& rows : report.skipped) {
    json["skipped"].push_back({{"reason", rows.reason}, {"rows", rows.rows}});
  }
  for (const KernelPrediction& row : report.rows) {
    json["rows"].push_back({{"line", row.line},
                            {"gpu", row.gpu},
                            {"stack", row.stack},
                            {"op", row.op},
                            {"predicted_s", row.predicted.value},
                            {"measured_s", row.measured.value},
                            {"error", row.error},
                            {"profile", row.profile}});
  }
  return json.dump(2) + '\n';
}

int RunValidateKernels(const Arguments& arguments) {
  const std::vector<KernelRow> rows = ReadKernelRows(arguments.Get("KERNELS").text);
  std::string profile;
  arguments.SetText("--profile", profile);
  const KernelReport report = ValidateKernels(rows, profile);
  arguments.Print(arguments.IsJson() ? KernelReportJson(report) : KernelReportText(report));
  return kExitOk;
}

}  // namespace

extern const Command kValidateKernelsCommand;
const Command kValidateKernelsCommand = {"validate-kernels",
                                         kValidateKernelsAbout,
                                         kValidateKernelsPositionals,
                                         kValidateKernelsFlags,
                                         {},
                                         RunValidateKernels};

}  // namespace shardwright
