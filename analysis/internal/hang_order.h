#pragma once

// What comes next in a process group: by the program of the plan, or by what came before.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "analysis/hang.h"
#include "schedule/program.h"

namespace shardwright::internal {

// The collectives of one step in a group of these ranks, in order, named by unit, phase and
// micro-batch. Empty: the program has none there.
[[nodiscard]] std::vector<HangCall> StepOf(const Program& program,
                                           const std::vector<std::int64_t>& ranks);

// Whether the step has such a collective.
[[nodiscard]] bool IsInStep(const std::vector<HangCall>& step, const HangCall& call);

// A place in the step: the index of the collective that comes next.
struct StepPlace {
  std::size_t index = 0;
  std::int64_t step = -1;  // how many steps came before; -1: unknown
};

// Where a rank is in the step after `calls`: all places that explain them equally well. A call that
// is not in the program costs less than one of the program that was not made. `from_start`: calls
// are all that were ever issued. Only as many of the last calls count as keep the work below 2 x
// 10^7. O(calls * step).
[[nodiscard]] std::vector<StepPlace> PlacesAfter(const std::vector<HangCall>& step,
                                                 std::span<const HangCall> calls, bool from_start);

// What will come after `calls` if the job goes on as it did: what came after the longest end of
// them that had been there before. Empty when there was none. O(calls).
[[nodiscard]] std::vector<HangCall> ContinuationOf(std::span<const HangCall> calls,
                                                   std::size_t count);

}  // namespace shardwright::internal
