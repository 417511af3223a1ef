#pragma once

// The clock of the simulator: runs a program op by op by the rules of docs/execution_model.md and
// returns when steps begin and end. All times are integer picoseconds, so that ties are exact and
// equal inputs give equal results.
//
// One loop over events in time order (internal/event_loop.h): what ops take depends on what runs
// beside them. Tests run a loop for each rank, side by side (tests/simulator/all_ranks.h).

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "traces/trace.h"

namespace shardwright {

// Host time that an op loses before it is issued, besides its issue cost: what the caching
// allocator takes for calls to the driver and for retries. By op, ascending.
struct HostStall {
  OpId before_op;
  SimTime time;
  bool drains = false;  // before that the host waits for all that it has issued, as cudaFree does

  bool operator==(const HostStall&) const = default;
};
struct HostStalls {
  std::vector<HostStall> init, first_step, later_steps;

  [[nodiscard]] bool empty() const {
    return init.empty() && first_step.empty() && later_steps.empty();
  }
  bool operator==(const HostStalls&) const = default;
};

struct EngineOptions {
  // Ops slow each other down by PriceTable::contention. Off: every speed is 1.
  bool contention = true;
  // Steps to simulate at most while looking for the steady state; >= 2.
  int max_steps = 8;
  // Not owned; null: none.
  const HostStalls* stalls = nullptr;
};

// Where the time of one step went.
struct StepTiming {
  SimTime time;  // from the completion of everything before to the completion of this step
  std::array<SimTime, kStreamCount> busy{};  // per stream; kHost: host ops
  SimTime host_blocked;                      // host waiting for the device
  SimTime host_issue;                        // host issuing ops
  // Idle time of the compute stream, by the stream of the op it waited for; kHost: waiting for the
  // host to issue. Together with busy[kCompute] it fills the time between the last compute op of
  // the step before and the last one of this step.
  std::array<SimTime, kStreamCount> compute_idle{};
  SimTime collectives_on_compute;  // part of busy[kCompute]

  // Time the compute stream lost to communication: idle, waiting for the gather, reduce and
  // replicate streams, or running collectives itself.
  [[nodiscard]] SimTime ExposedCommunication() const;
  bool operator==(const StepTiming&) const = default;
};

struct EngineResult {
  SimTime init;                    // until everything of the init body is complete
  StepTiming first;                // the first step
  StepTiming steady;               // the last simulated step; `time` is the period
  bool is_steady = false;          // false: no fixpoint within max_steps; steady.time is a mean
  int steps = 0;                   // steps simulated, the first one included
  std::int64_t simulated_ops = 0;  // device ops whose times were computed

  bool operator==(const EngineResult&) const = default;
};

// Memory that runs of the engine reuse, so that later runs allocate nothing. Not thread-safe.
class EngineWorkspace {
 public:
  EngineWorkspace();
  ~EngineWorkspace();
  EngineWorkspace(EngineWorkspace&&) noexcept;
  EngineWorkspace& operator=(EngineWorkspace&&) noexcept;

  struct State;
  [[nodiscard]] State& state() { return *state_; }

 private:
  std::unique_ptr<State> state_;
};

// Runs init, the first step and steps until two successive ones differ by a shift in time only.
// Requires a program that Verify accepts and a price for each shape. Throws InputError when times
// would leave the range of SimTime. O(ops * steps).
[[nodiscard]] EngineResult RunEngine(const Program& program, const PriceTable& prices,
                                     const EngineOptions& options, EngineWorkspace& workspace);

// The same, and appends the spans of init, the first step and the last simulated one.
[[nodiscard]] EngineResult RunEngineWithSpans(const Program& program, const PriceTable& prices,
                                              const EngineOptions& options,
                                              EngineWorkspace& workspace, std::vector<Span>& spans);

}  // namespace shardwright
