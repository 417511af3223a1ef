#pragma once

// The engine without contention: one pass over the ops in issue order, with skipping of repeats.

#include <cstdint>
#include <vector>

#include "schedule/program.h"
#include "schedule/repetition.h"
#include "simulator/engine.h"
#include "simulator/internal/engine_state.h"
#include "traces/trace.h"

namespace shardwright::internal {

// Ops [begin, end) of a body.
struct OpRange {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

// Times of one op, besides its end.
struct OpRecord {
  std::int64_t issued = 0;
  std::int64_t start = 0;
  std::int64_t stream_free = 0;  // when its stream predecessor ended; host ops: the host clock
  std::int64_t group_free = 0;   // when the collective before it on its communicator ended
};

// Times of one run of a body.
struct BodyTimes {
  std::vector<std::int64_t> end;   // of every op, skipped ones included
  std::vector<OpRecord> records;   // of simulated ops
  std::vector<OpRange> simulated;  // in order; the ops that were not skipped
};

struct LinearState {
  const Program* program = nullptr;
  const Body* body = nullptr;
  const std::vector<Repeat>* repeats = nullptr;  // of the body that are skipped
  std::vector<Cost> costs;
  std::int64_t simulated_ops = 0;
  Clock clock;
  Totals totals;
  std::vector<std::int64_t> slots;         // when the op that set the slot ended, or kNever
  std::vector<std::uint8_t> slot_streams;  // the stream of that op
  BodyTimes times;                         // of the body run in progress
  std::size_t repeat_cursor = 0;           // next entry of repeats
  // The body run before, for comparing steps.
  BodyTimes previous_times;
  std::vector<std::int64_t> previous_slots;
};

// Runs ops [begin, end) of state.body.
void AdvanceLinear(LinearState& state, std::uint32_t begin, std::uint32_t end);

// Which runs of ops are compared, to find out whether time goes on linearly from here: each op's
// times in copy B minus those in copy A, the copy before, are its increments.
struct CopyPair {
  const BodyTimes* a = nullptr;
  const BodyTimes* b = nullptr;
  std::uint32_t shift = 0;             // op i of copy B is op i - shift of copy A
  std::size_t a_begin = 0, a_end = 0;  // its entries of a->simulated
  std::size_t b_begin = 0, b_end = 0;
  const Clock* before = nullptr;  // clocks before and after copy B
  const Clock* after = nullptr;
  const std::vector<std::int64_t>* slots_before = nullptr;  // null within a body
  const std::vector<std::int64_t>* slots_after = nullptr;
  std::uint32_t run_begin = 0;  // first op of the first copy
};

inline constexpr std::int64_t kForever = std::int64_t{1} << 62;

// For how many copies after B, at most `limit`, every op's times grow by just its increments.
//
// Times are maxima of sums. If a maximum is attained in B by a term that grows as fast as the
// result, it is attained by that term until a term that grows faster catches up; the smallest
// quotient gap / excess over all terms of all ops is the answer (induction over ops and copies).
// Idle times, busy times and what a compute op waits for stay the same meanwhile. kForever when
// nothing ever catches up. 0 when B is still part of a transient. O(edges of the simulated ops).
[[nodiscard]] std::int64_t LinearCopies(const LinearState& state, const CopyPair& pair,
                                        std::int64_t limit);

// Runs state.body from its first to its last op, skipping its repeats.
void RunBodyLinear(LinearState& state);

}  // namespace shardwright::internal
