#include "tests/schedule/check_placement.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/print.h"
#include "tests/schedule/brute_force.h"

namespace shardwright {
namespace {

// [offset, offset + size) of a buffer.
std::pair<std::int64_t, std::int64_t> RangeOf(const Program& program, const Placement& placement,
                                              BufferId buffer) {
  const std::int64_t offset = placement.offsets[buffer.value].value;
  return {offset, offset + program.buffers[buffer.value].size.value};
}

}  // namespace

Placement CheckPlacement(const Program& program, Bytes alignment) {
  Placement placement = Place(program, {alignment});
  REQUIRE(placement.offsets.size() == program.buffers.size());
  for (std::size_t b = 0; b < program.buffers.size(); ++b) {
    const auto [begin, end] = RangeOf(program, placement, BufferId(b));
    CHECK(begin >= 0);
    CHECK(begin % alignment.value == 0);
    CHECK(end <= (program.buffers[b].on_host ? placement.host_size : placement.device_size).value);
  }
  CHECK(placement.device_size >= PeakInUse(program));
  const BruteForceOrder order(program);
  const std::vector<Allocation> lives = AllocationsOf(program, order);
  for (std::size_t i = 0; i < lives.size(); ++i) {
    const auto [begin, end] = RangeOf(program, placement, lives[i].buffer);
    for (std::size_t j = 0; j < i; ++j) {
      const auto [other_begin, other_end] = RangeOf(program, placement, lives[j].buffer);
      const bool same_arena = program.buffers[lives[i].buffer.value].on_host ==
                              program.buffers[lives[j].buffer.value].on_host;
      if (same_arena && std::max(begin, other_begin) < std::min(end, other_end) &&
          !AreOrdered(order, lives[i], lives[j])) {
        FAIL_CHECK(BufferName(program, lives[i].buffer), " and ",
                   BufferName(program, lives[j].buffer), " share bytes without an order");
      }
    }
  }
  return placement;
}

}  // namespace shardwright
