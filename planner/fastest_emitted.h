#pragma once

// Which of a search's plans is the fastest once a framework runs it, since settings files cannot
// say all of a plan.
//
// Example: the search's best plan takes 17.2 s with a prefetch that Accelerate cannot express. As
// Accelerate runs it, it takes 21.8 s, and the third plan 19.9 s: the third one is the answer.

#include <optional>

#include "planner/emitters/emitters.h"
#include "planner/search.h"
#include "schedule/plan.h"
#include "schedule/plan_file.h"

namespace shardwright {

// Emits the 16 fastest plans that fit, and `own`, to `target`, simulates each as emitted, and
// returns the fastest that fits without retries. It becomes the best of `result`, with its own
// candidate, and all of the front. Returns nothing, and changes nothing, where none fits. `job`:
// what was searched.
[[nodiscard]] std::optional<PlanFile> FastestEmitted(const Plan& own, const Emitter& target,
                                                     const PlanFile& job, SearchResult& result);

// Makes the run itself the answer, and returns true, where it fits without retries and nothing of
// `result` is faster. It needs no margin: it runs already.
bool KeepRun(const PlanFile& run, SearchResult& result);

}  // namespace shardwright
