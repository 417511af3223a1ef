#pragma once

// Where the missing MFU goes: from the time that a step's FLOPs would take at the GPU's peak to the
// time that the step takes, one reason after another.

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/plan_file.h"
#include "schedule/program.h"
#include "simulator/attribution.h"
#include "simulator/simulate.h"

namespace shardwright {

// Every moment of the compute stream belongs to one of these.
enum class MfuLoss : std::uint8_t {
  // FLOPs that kernels of forward and backward have and the convention does not count, at the peak;
  // negative where it counts more (all of causal attention, of which half runs).
  kCounting,
  kProducts,        // matrix products and convolutions: what they take beyond their FLOPs at peak
  kAttention,       // fused attention, likewise
  kElementwise,     // element-wise work, norms, softmax, losses, lookups
  kLaunches,        // between the kernels of an op
  kRecomputation,   // forward kernels that run again
  kOptimizer,       // updates, norm and clipping of gradients, and what the training loop does
  kCopies,          // into and out of the buffers of collectives, and sums of gradients
  kNeighbours,      // kernels are slower while collectives and copies run beside them
  kExposedTraffic,  // waiting for collectives
  kHostTraffic,     // waiting for copies between host and device
  kHost,            // waiting for the host, which issues too late
  kPeers,           // waiting for slower ranks
  kOther,           // rounding
};
inline constexpr std::size_t kMfuLossCount = 14;
[[nodiscard]] std::string_view NameOf(MfuLoss loss);  // "products below peak"

// at_peak + the sum of lost = step_time, to the picosecond.
struct MfuWaterfall {
  SimTime at_peak;  // the convention's FLOPs at Rates::peak: MFU is at_peak / step_time
  std::array<SimTime, kMfuLossCount> lost{};
  SimTime step_time;
};

// What the ops of the compute stream take in the last step of a result with a trace, by loss, and
// at the end the FLOPs of forward and backward at the peak. O(ops).
[[nodiscard]] std::vector<SimTime> SumsForMfu(const PlanFile& file, const Program& program,
                                              const SimulationResult& result);

// Of a step that takes as long and waits for as much as `attribution` says.
[[nodiscard]] MfuWaterfall ExplainMfu(const PlanFile& file, const std::vector<SimTime>& sums,
                                      const Attribution& attribution);

}  // namespace shardwright
