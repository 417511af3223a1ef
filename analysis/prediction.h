#pragma once

// What simulate reports, worked out of a simulation.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "analysis/mfu_waterfall.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/attribution.h"
#include "simulator/device_time.h"
#include "simulator/jitter.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"

namespace shardwright {

struct Prediction {
  Seconds step_time;
  Seconds first_step_time;
  double tokens_per_second_per_gpu = 0.0;
  bool counts_images = false;  // of an image model, tokens are images
  // Model FLOPs of a step (ConventionFlopsPerSample; a third of them for a job that only runs
  // forward) over step time times `peak`.
  double mfu = 0.0;
  MfuWaterfall waterfall;  // of the last simulated step
  FlopsPerSecond peak;     // dense peak of the compute dtype, or of fp32 where the GPU lacks it
  bool has_dtype = true;   // false: `peak` is that of fp32 instead
  Seconds exposed_comm;

  MemoryPeak device_peak;  // by category; the larger of first and steady step
  bool peak_is_first = false;
  Bytes reserved;  // at most, in any step; where that ran out, no less than what is allocated
  Bytes outside;
  Bytes placed;  // one arena with fixed offsets for everything allocated (Place)
  std::int64_t retries_per_step = 0;
  Bytes usable;               // device memory less the job's margin
  Bytes memory_error;         // how far Needed() may be off: DefaultMargin of the device's memory
  bool has_allocator = true;  // native plans have none, but one arena
  Attribution attribution;    // of the last simulated step
  DeviceTime device;          // of that step
  Bytes host_peak;            // of all ranks of one node
  Bytes host_limit;           // page-locked memory of one node; 0: the cluster does not say
  std::optional<StepDistribution> distribution;  // where ranks are not alike
  // One line for each limit that the plan breaks; empty = it fits.
  std::vector<std::string> misfits;

  // Of the device's memory.
  [[nodiscard]] Bytes Needed() const { return (has_allocator ? reserved : placed) + outside; }
};

// What accounts of the plan need for Predict. `file` must outlive it.
[[nodiscard]] SumSpans SumsOf(const PlanFile& file);
// Requires a result with reserved memory; `account` is of it (AccountForPlan, with SumsOf).
[[nodiscard]] Prediction Predict(const PlanFile& file, const SimulationResult& result,
                                 StepAccount account);
// Requires a result with reserved memory and a trace.
[[nodiscard]] Prediction Predict(const PlanFile& file, const Program& program,
                                 const SimulationResult& result);

}  // namespace shardwright
