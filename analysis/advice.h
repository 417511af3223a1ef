#pragma once

// What a training job should change, told by a trace of it: by what the trace shows alone, or with
// its plan by simulating each change. docs/advise.md.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/step_costs.h"
#include "planner/single_changes.h"
#include "schedule/plan.h"

namespace shardwright {

enum class AdviceTopic : std::uint8_t {
  kSync,  // to kMesh: as PlanChoice
  kReshard,
  kPrefetch,
  kOffload,
  kRecompute,
  kUnits,
  kBatch,
  kMesh,
  kDataLoader,
  kSmallKernels,
  kGraphBreaks,
  kStragglers,
};
[[nodiscard]] std::string_view NameOf(AdviceTopic topic);
// About how parameters are sharded, gathered and reduced.
[[nodiscard]] constexpr bool IsAboutFsdp(AdviceTopic topic) {
  return topic < AdviceTopic::kDataLoader;
}

// What a change takes.
enum class Effort : std::uint8_t {
  kLine = 1,      // one setting
  kScript = 2,    // wrapping, or the loop
  kPlatform = 3,  // how the job is launched, or the model's code
};
[[nodiscard]] std::string_view NameOf(Effort effort);

struct Advice {
  AdviceTopic topic = AdviceTopic::kSync;
  Effort effort = Effort::kLine;
  std::string what;  // "reduce gradients after the last micro-batch, not after each"
  std::string seen;  // in the trace; empty: nothing that one could point at
  std::string how;   // the line that says it in the job's framework; empty: nothing is known
  double gain = 0;   // seconds of a step
  double band = 0;   // half-width, seconds
  bool is_predicted = false;           // false: at most `gain`, since other work may take its place
  std::optional<std::int64_t> memory;  // bytes more per GPU; not known without a plan
  std::optional<std::size_t> change;   // index into SingleChanges::best
};

// Less than this part of a step is not worth advice.
inline constexpr double kLeastGain = 0.01;

// By the trace alone. By gain over effort. `dialect`: whose lines to tell.
[[nodiscard]] std::vector<Advice> AdviceOf(const StepCosts& costs, Dialect dialect);

// What is about FSDP is simulated instead: `changes` of a plan that the trace is of, with bands of
// their gains as parts of the step, one per change.
[[nodiscard]] std::vector<Advice> AdviceOf(const StepCosts& costs, const Plan& plan,
                                           const SingleChanges& changes,
                                           const std::vector<double>& bands);

// Whether anything is said about FSDP that is worth a percent or two of the step.
[[nodiscard]] bool HasFsdpProblem(const StepCosts& costs, const std::vector<Advice>& advice);

}  // namespace shardwright
