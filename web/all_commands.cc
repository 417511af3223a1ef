// The commands that the page in a browser has.

#include <array>

#include "cli/command.h"

namespace shardwright {

extern const Command kEstimateCommand;
extern const Command kListCommand;
extern const Command kInspectCommand;
extern const Command kInspectTraceCommand;
extern const Command kPlanCommand;
extern const Command kSimulateCommand;
extern const Command kSweepCommand;
extern const Command kGoodputCommand;
extern const Command kBaselinesCommand;
extern const Command kEmitCommand;
extern const Command kCompareCommand;
extern const Command kReportCommand;
extern const Command kDiffCommand;

std::span<const Command* const> AllCommands() {
  static constexpr std::array kCommands = {
      &kEstimateCommand, &kListCommand,   &kInspectCommand, &kInspectTraceCommand, &kPlanCommand,
      &kSimulateCommand, &kSweepCommand,  &kGoodputCommand, &kBaselinesCommand,    &kEmitCommand,
      &kCompareCommand,  &kReportCommand, &kDiffCommand};
  return kCommands;
}

}  // namespace shardwright
