#pragma once

// One plan predicted: lowered, verified, simulated, and held against the limits of its job. Every
// plan takes this way, whoever made it.
//
// evaluate.cc has an example with numbers.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/plan_programs.h"
#include "simulator/simulate.h"

namespace shardwright {

// A limit that a plan breaks.
struct Misfit {
  enum class Kind : std::uint8_t {
    kDevice,         // the buffers alone (native: their arena) take more than the device has
    kFragmentation,  // they would fit, but not into the caching allocator's segments
    kHost,           // page-locked memory of a node
  };
  Kind kind = Kind::kDevice;
  Bytes needed;
  Bytes limit;
  std::string text;  // "does not fit: ..."

  [[nodiscard]] Bytes Excess() const { return needed - limit; }
};

// A program that Verify refuses is our bug.
void CheckLegal(const Program& program);

// Lower, then Verify. Throws InputError for a plan that the dialect cannot express.
[[nodiscard]] Program LowerAndVerify(const PlanFile& file);
// Those of all stages.
[[nodiscard]] std::vector<Program> LowerAndVerifyStages(const Problem& problem, const Plan& plan);

// Stages side by side. Without a time where the stage that needs most needs more than `most`.
[[nodiscard]] SimulationResult SimulateStages(const std::vector<Program>& programs,
                                              const Problem& problem, Bytes most);

// Device memory that the job may use: what the GPU has less the job's margin, and less what an
// inference engine on it keeps while the model learns.
[[nodiscard]] Bytes UsableMemory(const Problem& problem);

// What that engine reserves while it generates; 0: there is none.
[[nodiscard]] Bytes EngineMemory(const Problem& problem);

// The memory of the caching allocator in the simulation of a plan: the device's usable memory, less
// the bytes outside the allocator. If that is too little, the allocator's retries are part of the
// step.
[[nodiscard]] SimulateOptions SimulateOptionsOf(const Problem& problem, const Program& program);

// The limits that a simulated plan breaks, `usable` of device memory; empty = it fits. A native
// plan is held against what its arena takes (`placed`, see Place; unused for the others), any other
// against what its buffers take and, with reserved memory in `result`, against fragmentation. Of
// kFragmentation, `needed` is what the buffers and the memory outside the allocator take, which is
// below the limit; see Outcome::misfits for the rest.
[[nodiscard]] std::vector<Misfit> FindMisfits(const Problem& problem, const Plan& plan,
                                              Bytes usable, Bytes placed,
                                              const SimulationResult& result);

struct Rates {
  double tokens_per_second_per_gpu = 0.0;  // images for image models
  // Model FLOPs of a step (ConventionFlopsPerSample; a third of them for a job that only runs
  // forward) over step time times `peak`.
  double mfu = 0.0;
  FlopsPerSecond peak;    // dense peak of the compute dtype, or of fp32 where the GPU lacks it
  bool has_dtype = true;  // false: `peak` is that of fp32 instead
};
[[nodiscard]] Rates RatesOf(const Problem& problem, const Plan& plan, Seconds step_time);

// What a plan takes.
struct Outcome {
  bool is_allowed = true;  // false: the dialect cannot express the plan (Evaluator::Try)
  std::string refusal;     // then, why, as far as it was lowered
  Seconds step_time;
  Seconds exposed_comm;
  Seconds bubble;                  // of a pipeline, in the mean of its ranks
  MemoryPeak device_peak;          // allocated
  Bytes outside;                   // the allocator
  Bytes host_peak;                 // page-locked, of all ranks of one node
  Bytes reserved;                  // by the caching allocator, at most; 0: it was not asked
  Bytes placed;                    // native: its arena, where the allocator was asked; else 0
  bool runs_out = false;           // the allocator finds no room
  std::int64_t first_retries = 0;  // of the allocator, in the first step
  std::int64_t retries_per_step = 0;
  Bytes usable;
  // With EvaluateOptions::judges.
  Rates rates;
  // Of kFragmentation, `needed` is what the allocator reserves where memory does not end, plus what
  // is outside: that much is enough.
  std::vector<Misfit> misfits;

  [[nodiscard]] bool Fits() const { return misfits.empty(); }
  // What the buffers take, and what is outside.
  [[nodiscard]] Bytes Memory() const { return device_peak.total + outside; }
  // Bytes that the device holds: reserved, or without it allocated, and outside.
  [[nodiscard]] Bytes DeviceTotal() const;
  // The same at the worst moment, with native's arena in place of what is reserved.
  [[nodiscard]] Bytes Needed() const;
  // Does the allocator find room, or native's arena?
  [[nodiscard]] bool HasRoom() const;
  // Of the allocator, in the first step or in each of the others. An arena never retries.
  [[nodiscard]] std::int64_t Retries() const;
  // The largest by which a limit is broken; 0 if it fits.
  [[nodiscard]] Bytes Excess() const;
};

// Without a verdict: rates and misfits stay empty.
[[nodiscard]] Outcome OutcomeOf(const Problem& problem, const SimulationResult& result);

inline constexpr Bytes kNoLimit{std::int64_t{1} << 60};

struct EvaluateOptions {
  bool reserved = true;                // replay the caching allocator; about ten times slower
  Telling telling = Telling::kProven;  // of a step with many micro-batches; kRoughly: not verified
  // For one of many plans: it has no time where its buffers do not fit. Requires `reserved` to be
  // off.
  bool compares = false;
  // Limit on buffers and the memory outside the allocator; 0: UsableMemory. The allocator itself
  // always has UsableMemory.
  Bytes memory_limit{0};
  bool judges = true;  // find rates and misfits
};

// Throws InputError for a plan that breaks its dialect's rules or does not fit the cluster's ranks.
// One of many goes through an Evaluator (evaluator.h).
[[nodiscard]] Outcome Evaluate(const Problem& problem, const Plan& plan,
                               const EvaluateOptions& options = {});

}  // namespace shardwright
