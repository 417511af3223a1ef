#pragma once

// Where each span stands in a Chrome trace: its two slices in whole ticks, the steps that enclose
// the host's slices, and the arrows between slices.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "schedule/program.h"
#include "traces/chrome_write.h"
#include "traces/trace.h"

namespace shardwright::internal {

inline constexpr std::int64_t kPicosecondsPerNanosecond = 1000;

// In the order of BodyKind.
inline constexpr std::array<std::string_view, 3> kBodyNames = {"init", "warmup", "step"};

// To the nearest multiple of `unit` picoseconds, halves up: monotone, so order survives.
[[nodiscard]] constexpr std::int64_t RoundTicks(SimTime time, std::int64_t unit) {
  const std::int64_t shifted = time.value + unit / 2;
  return shifted >= 0 ? shifted / unit : -((unit - 1 - shifted) / unit);
}

// The slices of one span, in ticks: nanoseconds, or microseconds for kHta.
struct PlacedSpan {
  bool is_written = false;
  std::int64_t issue_begin = 0;  // on the host's track; not for host ops
  std::int64_t issue_end = 0;
  std::int64_t begin = 0;  // on the op's own track
  std::int64_t end = 0;
  // Idle time of the track before the op, by what the op waited for; the sum is the gap to the
  // track's last slice. 0 where that slice is in a step that was not recorded.
  std::int64_t wait_host = 0;          // until the op was issued
  std::int64_t wait_edges = 0;         // until its edges were done
  std::int64_t wait_communicator = 0;  // until earlier collectives of its group were done
  std::int64_t wait_peers = 0;         // until the last rank arrived
};

// Spans [first, last) of one rank that make one step, or its init.
struct StepSpans {
  std::size_t first = 0, last = 0;
  bool is_init = false;
  std::int64_t begin = 0, end = 0;  // of the host's slices
};

// An arrow from the end of one slice to another, by span index.
struct Flow {
  std::uint32_t from = 0;
  std::uint32_t to = 0;
};

struct Layout {
  std::int64_t unit = kPicosecondsPerNanosecond;  // picoseconds per tick
  std::vector<PlacedSpan> placed;                 // by span
  std::vector<StepSpans> steps;
  std::vector<Flow> flows;  // by `to`
  // Which tracks have slices, by rank in order of appearance.
  struct RankTracks {
    Rank rank;
    std::array<bool, kStreamCount> used{};
  };
  std::vector<RankTracks> ranks;
};

[[nodiscard]] Layout BuildLayout(const Program& program, const Trace& trace, ChromeProfile profile);

}  // namespace shardwright::internal
