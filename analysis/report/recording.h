#pragma once

// One step of one rank of a trace, cut out and moved to time 0: what the report draws.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/step_breakdown.h"
#include "core/units.h"
#include "schedule/program.h"
#include "simulator/attribution.h"
#include "traces/recording.h"
#include "traces/trace.h"

namespace shardwright {

// What colours an op. Compute is split by phase, the rest by what is moved.
enum class OpColour : std::uint8_t {
  kForward,
  kRecompute,
  kBackward,
  kOptimizer,
  kAllGather,
  kReduceScatter,
  kAllReduce,  // and other collectives
  kCopy,
  kHost,
};
inline constexpr std::size_t kOpColourCount = 9;
[[nodiscard]] std::string_view NameOf(OpColour colour);
[[nodiscard]] OpColour ColourOf(const Program& program, const Op& op);

// Time 0 is the end of the compute stream's last op of the step before. So the host is ahead of it.
// Memory changes when the host gets to a point of the program, which may be a whole step earlier;
// its samples are moved to where the compute stream gets there.
struct Recording {
  Rank rank;
  std::uint32_t step = 0;
  SimTime period;
  std::vector<Span> spans;            // of the step body, by op
  std::vector<OpId> awaited;          // by op: the edge that was done last; none: it has no edges
  std::vector<ComputeWait> waits;     // of the compute stream
  std::vector<PathSegment> critical;  // empty for measured steps
  std::vector<MemorySample> memory;   // at most kMaxMemorySamples, the largest included
  // Of another profiler: by span, which is no op of the program then. `unit` may be empty.
  struct Bar {
    OpColour colour = OpColour::kCopy;
    std::uint32_t micro_batch = 0;
    std::string unit, name;
  };
  std::vector<Bar> bars;
  [[nodiscard]] bool is_foreign() const { return !bars.empty(); }
  // A steady step: the next one is the same, one period later.
  [[nodiscard]] bool is_steady() const { return !critical.empty(); }
};
inline constexpr std::size_t kMaxMemorySamples = 2000;

// The last simulated step with its critical path. Requires a trace with one.
[[nodiscard]] Recording SimulatedRecording(const Program& program, const Trace& trace,
                                           SimTime period, const Attribution& attribution);

// The step of median period among those of rank 0 that followed another recorded one (all, if none
// did). Nothing without a complete step.
[[nodiscard]] std::optional<Recording> MeasuredRecording(const Program& program,
                                                         const Trace& trace);

// The step of median length of a recording of PyTorch's profiler or of Nsight Systems: work on the
// streams that a program would do it on, by start; without edges and waits, and allocated bytes as
// Category::kTemporary, since nothing tells what they hold. Throws InputError without a step.
[[nodiscard]] Recording ForeignRecording(const ProfilerRecording& recording);

// Of each of `count` equal stretches of time the sample with the largest sum over device
// categories. Requires samples in order of time.
[[nodiscard]] std::vector<MemorySample> ThinOut(const std::vector<MemorySample>& samples,
                                                std::size_t count);

}  // namespace shardwright
