#pragma once

// Where a step of a recorded trace spends its time, seen from the compute stream: the same cut
// through simulated and measured traces, so that their difference explains the gap between them.

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// What an op is, for comparisons. Compute ops are classed by the kernel that does most of the work.
enum class OpClass : std::uint8_t {
  kGemm,
  kAttention,
  kConv,
  kElementwise,
  kNorm,
  kSoftmax,
  kGatherScatter,
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kOtherCollective,
  kDeviceCopy,  // casts, copies into and out of communication buffers, gradient sums
  kHostCopy,
  kOptimizer,
  kHostOptimizer,
  kControl,  // waits, barriers, initialisation
};
inline constexpr std::size_t kOpClassCount = 16;
[[nodiscard]] std::string_view NameOf(OpClass op_class);
// Of one kernel; copies count as element-wise work, which they are.
[[nodiscard]] OpClass ClassOf(KernelClass kernel);
[[nodiscard]] OpClass ClassOf(const Program& program, const OpShape& shape);

// Time of the compute stream within one period.
struct StepBreakdown {
  std::array<double, kOpClassCount> run{};  // ops that ran on the compute stream, seconds
  double host_issue = 0;                    // idle: the next op was not issued yet
  std::array<double, kStreamCount> wait{};  // idle: an edge's op on that stream was not done
  double communicator = 0;                  // idle: an earlier collective still ran
  double peers = 0;                         // idle: another rank was late
  double other = 0;                         // idle although nothing was missing
  double period = 0;                        // the sum of all

  [[nodiscard]] double Sum() const;
};

// For means over steps.
void Add(const StepBreakdown& from, StepBreakdown& to);
void Divide(StepBreakdown& parts, double by);

// What the compute stream waited for, with nothing to run.
enum class WaitKind : std::uint8_t { kHostIssue, kEdge, kCommunicator, kPeers, kOther };

// One idle stretch of the compute stream.
struct ComputeWait {
  OpId op;  // of the step body: it ran afterwards
  WaitKind kind = WaitKind::kOther;
  Stream stream = Stream::kHost;  // kEdge: where the awaited op ran
  OpId cause;                     // kEdge: the awaited op, of this step or the one before
  SimTime begin;
  SimTime end;

  bool operator==(const ComputeWait&) const = default;
};

// One complete run of the step body in a trace.
struct RecordedStep {
  Rank rank;
  std::uint32_t step = 0;
  std::size_t first = 0;           // Trace::spans[first, first + body size)
  std::size_t previous = kNoStep;  // index of the rank's step before, when that was recorded
  static constexpr std::size_t kNoStep = ~std::size_t{0};
};

// The steps of `trace` in which every op of the step body has exactly one span, by (rank, step).
// Requires spans in the trace's order. O(spans).
[[nodiscard]] std::vector<RecordedStep> FindRecordedSteps(const Program& program,
                                                          const Trace& trace);

// The breakdown of steps[index], from the end of the last compute op of the step before to the end
// of its own last one. Where the step before was not recorded, that end is taken to lie one
// `period` back; without a period either, the step begins when its first op is issued. O(ops +
// edges).
[[nodiscard]] StepBreakdown BreakDown(const Program& program, const Trace& trace,
                                      const std::vector<RecordedStep>& steps, std::size_t index,
                                      std::optional<SimTime> period = std::nullopt);

// The idle stretches that the breakdown adds up, in order of time; same arguments, same bounds.
[[nodiscard]] std::vector<ComputeWait> FindComputeWaits(
    const Program& program, const Trace& trace, const std::vector<RecordedStep>& steps,
    std::size_t index, std::optional<SimTime> period = std::nullopt);

}  // namespace shardwright
