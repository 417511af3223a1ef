// The table of subcommands.

#include <array>

#include "cli/command.h"

namespace shardwright {

extern const Command kEstimateCommand;
extern const Command kListCommand;
extern const Command kInspectCommand;
extern const Command kInspectTraceCommand;
extern const Command kTopoCommand;
extern const Command kPlanCommand;
extern const Command kSimulateCommand;
extern const Command kSweepCommand;
extern const Command kGoodputCommand;
extern const Command kBaselinesCommand;
extern const Command kImportRunCommand;
extern const Command kExportCommand;
extern const Command kRunCommand;
extern const Command kEmitCommand;
extern const Command kEvalCommand;
extern const Command kGenerateCommand;
extern const Command kCheckpointCommand;
extern const Command kCompareCommand;
extern const Command kAdviseCommand;
extern const Command kJudgeCommand;
extern const Command kReportCommand;
extern const Command kValidateCommand;
extern const Command kPriceCommand;
extern const Command kCalibrateCommand;
extern const Command kFitCommand;
extern const Command kPageCommand;
extern const Command kDiffCommand;
extern const Command kCheckCommand;
extern const Command kConfigCommand;
extern const Command kDoctorCommand;
extern const Command kHangCommand;
extern const Command kCompletionCommand;
extern const Command kManCommand;

std::span<const Command* const> AllCommands() {
  static constexpr std::array kCommands = {
      &kEstimateCommand, &kListCommand,         &kInspectCommand,    &kPlanCommand,
      &kSimulateCommand, &kSweepCommand,        &kGoodputCommand,    &kBaselinesCommand,
      &kEmitCommand,     &kImportRunCommand,    &kExportCommand,     &kRunCommand,
      &kEvalCommand,     &kGenerateCommand,     &kCheckpointCommand, &kCompareCommand,
      &kAdviseCommand,   &kValidateCommand,     &kPriceCommand,      &kCalibrateCommand,
      &kFitCommand,      &kReportCommand,       &kPageCommand,       &kDiffCommand,
      &kCheckCommand,    &kConfigCommand,       &kDoctorCommand,     &kCompletionCommand,
      &kManCommand,      &kInspectTraceCommand, &kTopoCommand,       &kHangCommand,
      &kJudgeCommand,
  };
  return kCommands;
}

}  // namespace shardwright
