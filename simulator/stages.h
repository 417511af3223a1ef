#pragma once

// One step of a pipeline: the event loop of each stage, side by side. A transfer starts when both
// of its ends have come, and what all stages do together when all have. Other collectives are among
// ranks of one stage, which are alike.
//
// Example: 4 stages of f = 1 s and b = 2 s each per micro-batch, 8 micro-batches, transfers that
// take no time. By 1F1B, as by GPipe, a step takes (8 + 3) * 3 = 33 s, of which each stage computes
// for 24 s.

#include <span>
#include <vector>

#include "schedule/program.h"
#include "simulator/engine.h"
#include "simulator/simulate.h"
#include "traces/trace.h"

namespace shardwright {

struct PipelineTiming {
  SimTime step_time;             // of the last of EngineOptions::max_steps, over all stages
  bool is_steady = false;        // the one before took as long
  std::vector<StepTiming> last;  // that step by stage; without its time
};

// With prices of one program each, in the order of stages. Requires programs that VerifyRanks
// accepts. `traces`, if given, gets the spans of the first and the last step by stage, of the first
// rank of each. O(events * stages).
[[nodiscard]] PipelineTiming RunStages(std::span<const Program> programs,
                                       std::span<const PriceTable> prices,
                                       const EngineOptions& options,
                                       std::vector<Trace>* traces = nullptr);

struct PipelineResult {
  PipelineTiming timing;
  std::vector<SimulatedMemory> memory;  // by stage, without reserved memory

  // Compute of the stage waits for other stages.
  [[nodiscard]] SimTime Bubble(std::size_t stage) const;
};
[[nodiscard]] PipelineResult MemoryOfStages(std::span<const Program> programs,
                                            const Cluster& cluster, const Profile& profile);
[[nodiscard]] PipelineTiming TimeOfStages(std::span<const Program> programs, const Cluster& cluster,
                                          const Profile& profile, bool contention,
                                          std::vector<Trace>* traces = nullptr);

// The step, what the stages wait in the mean, and the memory of the one that needs most.
[[nodiscard]] SimulationResult SumOf(const PipelineResult& result);

}  // namespace shardwright
