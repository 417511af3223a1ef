#pragma once

#include <optional>
#include <vector>

#include "schedule/plan_file.h"
#include "topologies/profile.h"

namespace shardwright {

// How far the gains of other plans over that of `file` may be off, as parts of its step:
// half-widths by the spreads of the profile's numbers, as StepTimeBand takes them, of which what
// moves both plans alike cancels; and half of what remains open where the step was measured to be
// `unexplained` longer than simulated (a part of it), since that may or may not grow with the rest.
// `other`, if given, is a profile that says the same of what was measured: bands count what it says
// of other plans. In order of `plans`. Costs one simulation per plan and number. Throws as
// StepTimeBand does.
[[nodiscard]] std::vector<double> GainBands(const PlanFile& file, const std::vector<Plan>& plans,
                                            double unexplained,
                                            const std::optional<Profile>& other = std::nullopt);

}  // namespace shardwright
