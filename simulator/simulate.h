#pragma once

// Front door of the simulator: what one training step costs in time and memory.
//
// Times are SimTime (picoseconds), memory is Bytes. A run prices the op shapes, measures the
// allocated bytes without a clock, and runs steps until two are alike. With `reserved` it replays
// PyTorch's caching allocator as well. simulate.cc has an example of the rounds between allocator
// and clock.

#include <optional>

#include "core/units.h"
#include "schedule/plan.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "simulator/costs/pricer.h"
#include "simulator/engine.h"
#include "simulator/memory.h"
#include "simulator/reserved.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"
#include "traces/trace.h"

namespace shardwright {

// Settings of a job for an allocator that may take `capacity`.
[[nodiscard]] AllocatorOptions AllocatorOptionsOf(const AllocatorSettings& settings,
                                                  Bytes capacity = Bytes(0));

struct SimulateOptions {
  // Ops that run at the same time slow each other down. Off: a faster link, GPU or memory is never
  // slower, exactly.
  bool contention = true;
  bool reserved =
      true;            // replay the caching allocator; needs all spans, so about ten times slower.
                       // It neither delays nor limits native programs, which run in one arena
  bool trace = false;  // fill SimulationResult::trace
  bool spans = false;  // fill its spans alone
  // For who asks for the steady step of a plan that the caching allocator takes: the first step's
  // time need not have the allocator's calls in it, and the replay ends where memory does.
  bool steady_only = false;
  int max_steps = 8;  // to look for the steady state in
  // Capacity 0: what the GPU has less what lives outside the allocator.
  AllocatorOptions allocator;
};

struct SimulatedMemory {
  AllocatedMemory allocated;
  Bytes outside;  // CUDA context and communicators, which no allocator sees
  std::optional<ReservedMemory> reserved;  // where SimulateOptions::reserved

  [[nodiscard]] Bytes Needs() const { return allocated.DevicePeak().total + outside; }
};

// Between replays of the allocator that agree on no steady step.
struct StepTimeRange {
  SimTime least, most;
};

struct SimulationResult {
  SimTime step_time;        // period of the steady state
  SimTime first_step_time;  // from the end of init
  SimTime exposed_comm;     // of the steady step; StepTiming::ExposedCommunication
  SimTime bubble;           // of a pipeline, in the mean of its ranks (SumOf)
  EngineResult timing;
  SimulatedMemory memory;
  Trace trace;  // init, the first and the last simulated step, where SimulateOptions::trace
  std::optional<StepTimeRange> unsettled;  // where there is such a range: `step_time` is its median
};

// Simulates programs on one cluster with one profile, both of which must outlive it or its next
// Use. Reuses its memory: after the first run of a program, runs without trace and reserved memory
// allocate nothing. Not thread-safe.
class Simulator {
 public:
  Simulator(const Cluster& cluster, const Profile& profile);

  // Goes on with these instead.
  void Use(const Cluster& cluster, const Profile& profile);

  // One rank for all: all ranks have this program and these prices. Requires a program that Verify
  // accepts. Throws InputError when the program does not fit the cluster.
  [[nodiscard]] SimulationResult Run(const Program& program, const SimulateOptions& options);
  // Memory of the program, without a clock: as Run's without SimulateOptions::reserved.
  [[nodiscard]] SimulatedMemory Allocated(const Program& program);

 private:
  const Cluster* cluster_;
  const Profile* profile_;
  std::optional<Pricer> pricer_;  // always there
  PriceTable prices_;
  EngineWorkspace engine_;
  MemoryWorkspace memory_;
};

[[nodiscard]] SimulationResult Simulate(const Program& program, const Cluster& cluster,
                                        const Profile& profile, const SimulateOptions& options);

// Whether a caching allocator waits for other streams before it reuses what the step frees, so that
// what it reserves depends on times, as on how far ahead the host is.
[[nodiscard]] bool RecordsStreams(const Program& program);

// Device memory that the caching allocator does not see: the CUDA context, and the communicators of
// the groups with more than one rank.
[[nodiscard]] Bytes OutsideBytes(const Program& program, const MemoryProfile& profile);

}  // namespace shardwright
