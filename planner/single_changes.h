#pragma once

// Simulates what one other choice would make of the plan that a job has, everything else as it is.
// A search finds the best plan; this tells its user which of the differences are worth the trouble.
//
// Example: a job reduces gradients after each of 4 micro-batches, in 1.2 s. The change "after each
// micro-batch" to "after the last" takes 1.0 s and fits: kSync is worth 17 %.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "planner/search.h"

namespace shardwright {

// By the place in a training script that says it.
enum class PlanChoice : std::uint8_t {
  kSync,       // when accumulated gradients are reduced
  kReshard,    // whether gathered parameters are freed after forward
  kPrefetch,   // what is gathered ahead
  kOffload,    // what lives on the host
  kRecompute,  // what is checkpointed
  kUnits,      // what is gathered together
  kBatch,      // micro-batch and accumulation
  kMesh,       // ranks that share one copy
};
[[nodiscard]] std::string_view NameOf(PlanChoice choice);

struct SingleChange {
  PlanChoice choice = PlanChoice::kSync;
  std::string from, to;  // "after each micro-batch", "after the last"
  Plan plan;
  Seconds step_time;
  Bytes memory;  // peak allocated and outside the allocator
};

struct SingleChanges {
  Seconds step_time;  // of the plan as it is
  Bytes memory;
  std::vector<SingleChange> best;  // of each choice the fastest that fits and is faster; by time
};

// Simulates each other value of each choice. `options` says what is fixed and the memory limit;
// its base is the plan. Throws InputError for a job that no plan can have.
[[nodiscard]] SingleChanges FindSingleChanges(const Problem& input, const SearchOptions& options);

}  // namespace shardwright
