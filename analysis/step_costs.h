#pragma once

// What a recorded step spends its time on, by unit: the same figures of a trace of ours and of a
// recording of another profiler.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "analysis/step_breakdown.h"
#include "core/units.h"
#include "schedule/program.h"
#include "traces/recording.h"
#include "traces/trace.h"

namespace shardwright {

// Means over the ranks and steps that count. "Exposed" is time in which the compute queue waited
// for it.
struct UnitCosts {
  std::string unit;  // "" where the recording does not name units
  double gathers = 0;
  double backward_gathers = 0;  // of them
  double late_gathers = 0;      // of them: waited for, and begun no earlier than the wait
  double reductions = 0;        // reduce-scatters
  double all_reductions = 0;    // over replicas, or of whole gradients
  Bytes gathered;               // the largest of its gathers; 0: not recorded
  double gather_busy = 0;       // seconds, whether exposed or not
  double reduce_busy = 0;
  double forward_exposed = 0;   // seconds, gathers in forward
  double backward_exposed = 0;  // and in backward
  double late_exposed = 0;      // of both, by late gathers
  double reduce_exposed = 0;    // reductions over shards and replicas

  [[nodiscard]] double Exposed() const {
    return forward_exposed + backward_exposed + reduce_exposed;
  }
};

struct StepCosts {
  StepBreakdown parts;  // of one step; adds up to its time
  std::int64_t steps = 0, ranks = 0;
  double shortest = 0, longest = 0;  // seconds, of the steps
  std::int64_t micro_batches = 1;
  bool on_device = true;            // false: the host itself computes
  bool names_units = true;          // false: there is one row for all of them
  std::vector<UnitCosts> units;     // in the order of their first collective
  double copies_exposed = 0;        // between host and device
  double copies_busy = 0;           // the same, exposed or not
  double kernels = 0;               // pieces of work of the compute queue
  double data_loading = 0;          // the host waited for the next batch with nothing computing
  double host_updates = 0;          // nothing computes while the host updates what is offloaded
  double before_first = 0;          // idle between steps; contains what data_loading explains
  double compiled_regions = 0;      // calls of compiled graphs; 0: not compiled, or not recorded
  std::int64_t compiled_steps = 0;  // steps that have any

  [[nodiscard]] double Exposed() const;  // communication, of all units
  // Idle for want of work, but for what data loading and updates on the host explain.
  [[nodiscard]] double HostIdle() const;
};

// Of recordings, one per rank. Throws InputError where one has no step with work.
[[nodiscard]] StepCosts CostsOf(const std::vector<ProfilerRecording>& recordings);

// Of a trace of ours. `period`: of a simulated one (see BreakDown). Throws InputError for a trace
// without a complete step.
[[nodiscard]] StepCosts CostsOf(const Program& program, const Trace& trace,
                                std::optional<SimTime> period);

}  // namespace shardwright
