#include <cstdio>
#include <variant>

#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "core/json.h"

namespace shardwright {

int RunCommand(const CommandLine& command) {
  if (const auto* show = std::get_if<ShowText>(&command)) {
    WriteFileAtomically("-", show->text);
    return kExitOk;
  }
  if (const auto* list = std::get_if<ListCommand>(&command)) {
    return RunList(*list);
  }
  if (const auto* inspect = std::get_if<InspectCommand>(&command)) {
    return RunInspect(*inspect);
  }
  if (const auto* plan = std::get_if<PlanCommand>(&command)) {
    return RunPlan(*plan);
  }
  return RunSimulate(std::get<SimulateCommand>(command));
}

void Warn(const std::string& text) {
  std::fprintf(stderr, "warning: %s\n", text.c_str());
}

}  // namespace shardwright
