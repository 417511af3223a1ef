#include "cli/planned_units.h"

#include <cstddef>

namespace shardwright {

std::vector<UnitInfo> PlannedUnits(const Plan& plan, const Program& program) {
  const std::size_t planned = plan.units.size();
  std::vector<UnitInfo> units(program.units.begin(),
                              program.units.begin() + static_cast<std::ptrdiff_t>(planned));
  for (std::size_t i = planned; i < program.units.size(); ++i) {
    const UnitInfo& part = program.units[i];
    for (UnitInfo& unit : units) {
      if (part.name.starts_with(unit.name + "/")) {
        unit.params.insert(unit.params.end(), part.params.begin(), part.params.end());
        unit.elements += part.elements;
        unit.padded_elements += part.padded_elements;
        unit.shard_elements += part.shard_elements;
        break;
      }
    }
  }
  return units;
}

}  // namespace shardwright
