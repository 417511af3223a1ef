// The subcommands, in the order of --help.

#include <array>

#include "cli/command.h"

namespace shardwright {

std::span<const CommandFunction> CommandFunctions() {
  static constexpr std::array<CommandFunction, 28> kFunctions = {{
      {"estimate", EstimateCommand},
      {"plan", PlanCommand},
      {"simulate", SimulateCommand},
      {"emit", EmitCommand},
      {"import-run", ImportRunCommand},
      {"run", RunCommand},
      {"compare", CompareCommand},
      {"report", ReportCommand},
      {"advise", AdviseCommand},
      {"hang", HangCommand},
      {"judge", JudgeCommand},
      {"check", CheckCommand},
      {"doctor", DoctorCommand},
      {"list", ListCommand},
      {"inspect", InspectCommand},
      {"inspect-trace", InspectTraceCommand},
      {"topo", TopoCommand},
      {"sweep", SweepCommand},
      {"goodput", GoodputCommand},
      {"baselines", BaselinesCommand},
      {"diff", DiffCommand},
      {"export", ExportCommand},
      {"eval", EvalCommand},
      {"checkpoint", CheckpointCommand},
      {"page", PageCommand},
      {"calibrate", CalibrateCommand},
      {"validate", ValidateCommand},
      {"price", PriceCommand},
  }};
  return kFunctions;
}

}  // namespace shardwright
