#pragma once

// What a rank of a pipeline does, in order: actions (stage, pass, micro-batch). A step without a
// pipeline is the list 0F0, 0B0, 0F1, 0B1, ...
//
// Example: 2 stages, 3 micro-batches by k1F1B.
//
//   rank 0   0F0 0F1 0B0 0F2 0B1 0B2
//   rank 1   1F0 1B0 1F1 1B1 1F2 1B2
//
// Source: torch 2.13, distributed/pipelining/schedules.py, whose names and text form these are.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

enum class PipelineSchedule : std::uint8_t {
  kGPipe,                  // all forwards, then all backwards
  k1F1B,                   // a forward behind each backward, once the pipeline is full
  kInterleaved1F1B,        // the same with several stages per rank, in turns
  kLoopedBfs,              // GPipe's with several stages per rank, one behind the other
  kInterleavedZeroBubble,  // weight gradients later than those of inputs
  kZbvZeroBubble,          // the same; stages go down the ranks and up again: rank r of P has
                           // stages r and 2P - 1 - r
  kDualPipeV,              // so, too; forward and backward passes in pairs
};
inline constexpr std::array<std::string_view, 7> kPipelineScheduleNames = {
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"};

// Are gradients of weights passes of their own?
[[nodiscard]] constexpr bool SplitsBackward(PipelineSchedule schedule) {
  return schedule >= PipelineSchedule::kInterleavedZeroBubble;
}
[[nodiscard]] constexpr bool IsVShaped(PipelineSchedule schedule) {
  return schedule >= PipelineSchedule::kZbvZeroBubble;
}

struct StageAction {
  enum class Kind : std::uint8_t {
    kForward,
    kBackward,  // the next two at once
    kInputGrads,
    kWeightGrads,
    // Between the ranks of two stages (AddTransfers).
    kSendActivation,
    kReceiveActivation,
    kSendGradient,
    kReceiveGradient,
    kWaitForSends,  // compute waits for what was sent so far
    kReduceGrads,   // of all micro-batches, among the data-parallel ranks
    kGather,        // the stage's parameters
    kDrop,          // what was gathered of them
  };
  std::int32_t stage = 0;
  Kind kind = Kind::kForward;
  std::int32_t micro_batch = 0;
  bool joins_next = false;  // a send with the receive behind it, or a forward pass with the
                            // backward pass behind it (OVERLAP_F_B), as one

  bool operator==(const StageAction&) const = default;
};

struct Pipeline {
  PipelineSchedule schedule = PipelineSchedule::kGPipe;
  std::int64_t ranks = 1;
  std::int64_t stages_per_rank = 1;
  std::int64_t micro_batches = 1;
};

// The rank that has the stage, and the `place`-th stage of a rank.
[[nodiscard]] std::int64_t RankOf(const Pipeline& pipeline, std::int64_t stage);
[[nodiscard]] std::int64_t StageAt(const Pipeline& pipeline, std::int64_t rank, std::int64_t place);

// Nothing, or what the schedule asks of the numbers: "4 or more micro-batches, one per rank".
[[nodiscard]] std::string WhyNot(const Pipeline& pipeline);

// The passes of one rank. Requires WhyNot to find nothing. O(actions).
[[nodiscard]] std::vector<StageAction> ActionsOf(const Pipeline& pipeline, std::int64_t rank);

// The passes of a step without a pipeline.
[[nodiscard]] std::vector<StageAction> ActionsInTurn(std::int64_t micro_batches);

// The passes of one rank, with what torch sends, receives and waits for between them, and the
// reductions; of kInterleaved1F1B and later ones also the gathers. O(actions), of these of all
// ranks.
[[nodiscard]] std::vector<StageAction> AddTransfers(const Pipeline& pipeline, std::int64_t rank);

// "0F0,0F1,0B0", as torch's _dump_csv writes it; "0SEND_F1+0RECV_B0" for transfers that join.
// Requires an action.
[[nodiscard]] std::string ActionsText(const std::vector<StageAction>& actions);

}  // namespace shardwright
