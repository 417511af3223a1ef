// The commands that the page in a browser has.

#include <array>

#include "cli/command.h"

namespace shardwright {

std::span<const CommandFunction> CommandFunctions() {
  static constexpr std::array<CommandFunction, 13> kFunctions = {{
      {"estimate", EstimateCommand},
      {"list", ListCommand},
      {"inspect", InspectCommand},
      {"inspect-trace", InspectTraceCommand},
      {"plan", PlanCommand},
      {"simulate", SimulateCommand},
      {"sweep", SweepCommand},
      {"goodput", GoodputCommand},
      {"baselines", BaselinesCommand},
      {"emit", EmitCommand},
      {"compare", CompareCommand},
      {"report", ReportCommand},
      {"diff", DiffCommand},
  }};
  return kFunctions;
}

}  // namespace shardwright
