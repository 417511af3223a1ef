#pragma once

// A slow simulator of many ranks for tests, with contention, written apart from the event loop: it
// unrolls all bodies and looks at every stream of every rank at each event.

#include <span>

#include "tests/simulator/all_ranks.h"

namespace shardwright {

// As RunAllRanks. Requires groups that tile the ranks. O(events * ranks).
[[nodiscard]] AllRanksResult RunReferenceRanks(std::span<const RankProgram> ranks,
                                               const AllRanksOptions& options);

}  // namespace shardwright
