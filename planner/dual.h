#pragma once

// Computes a lower bound on the step time of all plans with one mesh, batch and offload: the dual
// of a linear program (docs/planning.md, "The bound").
//
// Example: 10 s of kernels and 4.5 s of gathers, each alone. Side by side, kernels advance by 0.8 s
// and gathers by 0.9 s per second (Occupancy::Row). At best both run for 5 s, which ends the
// gathers and leaves 6 s of kernels: no plan takes less than 11 s. The prices 1 and 2/9 prove it,
// since 0.8 x 1 + 0.9 x 2/9 = 1 and 10 x 1 + 4.5 x 2/9 = 11.

#include <array>
#include <vector>

#include "planner/measure.h"
#include "planner/occupancy.h"

namespace shardwright {

// Kernels that only stream through memory: alone they take `seconds` at least, and `streaming` * 16
// / l where they load the memory with l sixteenths, since gaps and short kernels are all that
// lowers the load. Which load it is depends on the units.
struct StreamingWork {
  double seconds = 0;
  double streaming = 0;
};

// One thing that gathered parameters may do after forward. Bytes stay on the device, or seconds go
// by to gather them again in a whole step, with copies of the gathered parameters on compute.
struct AfterForward {
  double bytes = 0;
  double seconds = 0;
  Occupancy::Transfer transfer = Occupancy::kRegather;
  StreamingWork copies;
};

// Everything that the program knows about an outer choice. Seconds are those of a whole step,
// alone, at the best rate.
struct Terms {
  const Measured* measured = nullptr;
  double passes = 1;  // micro-batches

  // Ordered: a step ends with work for which all reductions have to be over, and before which
  // nothing of the next step begins.
  bool is_ordered = false;
  double first_forwards = 0;         // ordered: those that run beside no reduction
  bool forward_gathers_end = false;  // and gathers before a forward are over when it is
  // Ordered: what is gathered again waits for the last op of forward that reads parameters.
  bool regathers_follow_forward = false;
  // Ordered: moments do not come and go beside the first forward either, as they do else.
  bool moments_end_before_forward = false;
  StreamingWork gather_copies;  // on compute, of what is gathered before forward; beside that
  StreamingWork reduce_copies;  // and of gradients, in backward
  StreamingWork update;         // ordered: beside gathers before forward; else beside anything
  double serial = 0;            // nothing runs beside
  double head = 0;              // nothing but what may run beside updates, and updates
  double tail = 0;              // nothing but reductions does

  std::array<double, Occupancy::kTransferCount> seconds{};  // at least
  std::vector<AfterForward> after_forward;                  // empty: nothing is gathered twice

  bool offloads_activations = false;
  double to_host_per_byte = 0, to_device_per_byte = 0;
  // Bytes besides those of blocks and of gathered parameters, less the limit.
  double device_excess = 0;
  double host_excess = 0;  // per device; only where `has_host_limit`
  bool has_host_limit = false;
  double device_limit = 1, host_limit = 1;
};

// No plan is faster, in seconds.
[[nodiscard]] double LeastTime(const Terms& terms, const Occupancy& occupancy);

}  // namespace shardwright
