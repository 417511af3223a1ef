#pragma once

// Counting groups in aligned blocks ("windows") of consecutive ranks.

#include <cstdint>
#include <vector>

#include "topologies/routing.h"

namespace shardwright::internal {

// Numbers of windows of `ranks` ranks such that every window of the endless tiling looks like one
// of them: as many groups, sharing as many members. One when blocks and windows align; never more
// than a few per rank of a window, however large the job.
[[nodiscard]] std::vector<std::int64_t> RepresentativeWindows(GroupShape shape, std::int64_t ranks);

struct WindowPart {
  std::int64_t groups = 0;    // with members inside
  std::int64_t crossing = 0;  // with members inside and outside
};
// Of window `window`, which holds the ranks [window * ranks, (window + 1) * ranks). O(1).
[[nodiscard]] WindowPart CountWindow(GroupShape shape, std::int64_t ranks, std::int64_t window);

// Windows that one group touches, at most. O(log).
[[nodiscard]] std::int64_t SpannedWindows(GroupShape shape, std::int64_t ranks);

}  // namespace shardwright::internal
