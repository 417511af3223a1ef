// The table of subcommands.

#include <array>

#include "cli/command.h"

namespace shardwright {

extern const Command kEstimateCommand;
extern const Command kPlanCommand;
extern const Command kSimulateCommand;
extern const Command kEmitCommand;
extern const Command kImportRunCommand;
extern const Command kRunCommand;
extern const Command kCompareCommand;
extern const Command kReportCommand;
extern const Command kAdviseCommand;
extern const Command kHangCommand;
extern const Command kJudgeCommand;
extern const Command kCheckCommand;
extern const Command kDoctorCommand;
extern const Command kListCommand;
extern const Command kInspectCommand;
extern const Command kInspectTraceCommand;
extern const Command kTopoCommand;
extern const Command kSweepCommand;
extern const Command kGoodputCommand;
extern const Command kBaselinesCommand;
extern const Command kDiffCommand;
extern const Command kExportCommand;
extern const Command kEvalCommand;
extern const Command kGenerateCommand;
extern const Command kCheckpointCommand;
extern const Command kPageCommand;
extern const Command kConfigCommand;
extern const Command kCalibrateCommand;
extern const Command kValidateCommand;
extern const Command kPriceCommand;

std::span<const Command* const> AllCommands() {
  static constexpr std::array kCommands = {
      &kEstimateCommand,   &kPlanCommand,   &kSimulateCommand, &kEmitCommand,
      &kImportRunCommand,  &kRunCommand,    &kCompareCommand,  &kReportCommand,
      &kAdviseCommand,     &kHangCommand,   &kJudgeCommand,    &kCheckCommand,
      &kDoctorCommand,     &kListCommand,   &kInspectCommand,  &kInspectTraceCommand,
      &kTopoCommand,       &kSweepCommand,  &kGoodputCommand,  &kBaselinesCommand,
      &kDiffCommand,       &kExportCommand, &kEvalCommand,     &kGenerateCommand,
      &kCheckpointCommand, &kPageCommand,   &kConfigCommand,   &kCalibrateCommand,
      &kValidateCommand,   &kPriceCommand};
  return kCommands;
}

}  // namespace shardwright
