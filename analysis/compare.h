#pragma once

// Compares a measured trace of a program with its simulation, op by op, and explains the gap.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "analysis/run_match.h"
#include "analysis/step_breakdown.h"
#include "core/units.h"
#include "schedule/program.h"
#include "simulator/costs/price.h"
#include "simulator/engine.h"
#include "topologies/cluster.h"
#include "traces/trace.h"

namespace shardwright {

// Busy time of one class of ops in one step, whatever the stream; mean over ranks and steps.
struct ClassComparison {
  OpClass op_class = OpClass::kGemm;
  std::int64_t ops = 0;  // per step and rank
  Seconds simulated;
  Seconds measured;
};

// One part of the step, seen from the compute stream. All parts add up to the step time, so their
// differences add up to the gap.
struct StepPart {
  std::string name;  // "run gemm", "wait for gather", "host issue", "wait for peers"
  Seconds simulated;
  Seconds measured;
};

struct OpComparison {
  OpId op;  // of the step body
  Seconds simulated;
  Seconds measured;
};

// Compute of one unit in one pass of one micro-batch, where kernels cannot be told apart by ops.
struct SegmentComparison {
  std::string unit;               // empty: all units, or the optimizer
  Phase phase = Phase::kForward;  // recomputation counts as backward
  std::uint32_t micro_batch = 0;
  Seconds simulated;
  Seconds measured;
};

struct MemoryComparison {
  Bytes simulated_peak, measured_peak;  // largest sum over device categories, of any rank
  std::array<Bytes, kCategoryCount> simulated{}, measured{};  // at those moments
};

// What one number of the profile would change: the simulation again, with the durations (or the
// host's issue costs) of one class multiplied so that the class takes as long as measured.
struct Calibration {
  std::string name;    // "gemm", "all_gather", "host issue"
  std::string fields;  // of the profile: "compute.gemm, compute.gemm_ramp"
  double factor = 1;   // measured / simulated
  Seconds step_time;   // with this one alone
};

struct Comparison {
  RunMatch match;  // groups empty: not known, since a trace of ours does not carry its plan
  Seconds simulated_step;
  Seconds measured_step;  // mean over ranks and steps
  Seconds measured_shortest, measured_longest;
  std::int64_t measured_steps = 0;  // steps of all ranks that count
  std::int64_t ranks = 0;
  std::int64_t spans = 0;                // recorded by the measurement, init and all steps
  std::int64_t matched = 0;              // of them in complete bodies, op by op as in the program
  std::vector<std::string> findings;     // where the measured trace contradicts the program
  std::vector<ClassComparison> classes;  // those with ops, in the order of OpClass
  std::vector<StepPart> parts;           // largest difference first
  std::vector<OpComparison> ops;         // of the step body, largest difference first
  std::vector<SegmentComparison> segments;  // of recordings without op ids, likewise
  std::vector<std::string> notes;           // what was assumed
  MemoryComparison memory;
  std::vector<Calibration> calibrations;  // the one that helps most first
  Seconds calibrated_step;                // with all of them at once

  [[nodiscard]] double gap() const;  // measured / simulated - 1
};

struct CompareInput {
  const Program& program;
  const Trace& simulated;
  // Of the simulation; nothing: the trace shows it, or else begins with the step.
  std::optional<SimTime> simulated_period;
  const Trace& measured;
  const PriceTable& prices;  // of the simulation, for calibrations
  EngineOptions engine;
  double core_share = 1;  // of a core that each rank has by design (CoreShare)
};

// Of a core: less than 1 where ranks take turns on those of the host.
[[nodiscard]] double CoreShare(const Cluster& cluster);

// The last simulated step is compared with all measured steps before which another one was
// recorded; when there are none, with the last one of each rank. Throws InputError when a trace
// holds no complete step. Requires traces that were read with `program`. O(spans + edges), and one
// simulation per class.
[[nodiscard]] Comparison Compare(const CompareInput& input);

}  // namespace shardwright
