#pragma once

// A step of GRPO as phases in turn: weights go to the inference engine, it generates, forwards tell
// log-probabilities, and the model learns. The last two are the plan's program.

#include <cstdint>
#include <optional>

#include "core/units.h"
#include "planner/evaluate.h"
#include "schedule/plan_file.h"

namespace shardwright {

// Times of the first three are of one generation.
struct RolloutPhases {
  Seconds weights;                    // to the engine
  std::optional<Seconds> generation;  // nothing: an engine elsewhere, or the trainer, unmeasured
  Seconds least, most;                // of the generation
  Seconds log_probabilities;
  Seconds learning;  // of one step
  double generations_per_step = 1;
  Seconds step;                 // the phases of one step, without an unknown generation
  Bytes engine, cache;          // what the engine reserves, and its room for keys and values
  std::int64_t samples = 0;     // that a GPU's engine generates
  std::int64_t concurrent = 0;  // of which its cache holds so many at once

  // By which part the step may be off, if what is no generation is by `band`.
  [[nodiscard]] double Band(double band) const;
};

// `step_time` is that of the plan's program. Nothing for jobs without a rollout. Simulates the plan
// once more where it has forwards for log-probabilities. Throws InputError for an engine whose
// memory does not hold the weights and one sample.
[[nodiscard]] std::optional<RolloutPhases> PhasesOf(const PlanFile& file, Seconds step_time);

// The same plan in a step that learns from what an earlier one generated.
[[nodiscard]] PlanFile WithoutForwards(const PlanFile& file);

}  // namespace shardwright
