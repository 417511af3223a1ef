#pragma once

// From a published run to a plan: the columns of a row decide on model, cluster, job and choices.
// What a row leaves open is filled by the rules of its stack, and said in a note. Neither the id
// nor the source nor any measured value has a part in it.

#include <string>
#include <vector>

#include "analysis/measured_run.h"
#include "schedule/plan_file.h"

namespace shardwright {

struct MappedRun {
  std::string skipped;  // why there is no plan; empty: `plan` is complete
  PlanFile plan;
  std::vector<std::string> notes;  // what was assumed or is only near what the row says
};

// `profile` is the name or file of a profile, or "auto": the default one of GPU and kernel set.
// Throws InputError for an unknown profile; a row that cannot be mapped says why in `skipped`.
[[nodiscard]] MappedRun MapRun(const MeasuredRun& run, const std::string& profile);
[[nodiscard]] MappedRun MapRun(const MeasuredRun& run, const Profile& profile);

}  // namespace shardwright
