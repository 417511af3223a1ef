#pragma once

// Compares a recording of PyTorch's profiler or Nsight Systems with the simulation of a plan. Spans
// join by unit, phase, micro-batch and order instead of op ids; docs/import.md has the rules.

#include <array>
#include <optional>
#include <vector>

#include "analysis/compare.h"
#include "analysis/recording_steps.h"
#include "simulator/costs/kernels.h"
#include "simulator/costs/price.h"
#include "simulator/engine.h"
#include "topologies/cluster.h"
#include "topologies/profile.h"
#include "traces/recording.h"
#include "traces/trace.h"

namespace shardwright {

struct CompareRecordingInput {
  const Program& program;
  const Cluster& cluster;
  const Profile& profile;
  const Trace& simulated;
  std::optional<SimTime> simulated_period;           // see CompareInput
  const std::vector<ProfilerRecording>& recordings;  // one per rank
  const PriceTable& prices;
  EngineOptions engine;
};

// The result's `ops` are the collectives that were found, `segments` the compute. Simulated ops are
// split among classes by what their kernels cost. Host issue is not calibrated: profilers slow it
// down. Throws InputError for recordings without a step. Requires at least one recording.
[[nodiscard]] Comparison CompareRecording(const CompareRecordingInput& input);

// Of one op shape: which part of its time each class of kernels takes. Sums to 1.
[[nodiscard]] std::array<double, kOpClassCount> ClassShares(const Program& program,
                                                            const OpShape& shape,
                                                            const KernelRates& rates);

}  // namespace shardwright
