// How families of groups lie on blocks of ranks. Declared in topologies/routing.h.

#include <cstdint>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "topologies/internal/group_windows.h"
#include "topologies/mesh.h"
#include "topologies/routing.h"

namespace shardwright {
namespace internal {

std::vector<std::int64_t> RepresentativeWindows(GroupShape shape, std::int64_t ranks) {
  const std::int64_t block = BlockOf(shape);
  // Blocks start at the same offset of a window again after this many.
  const std::int64_t block_count = ranks / std::gcd(block, ranks);
  // Windows inside one block look alike when they start at the same residue of the stride, and all
  // do when no two of their ranks are in one group.
  const std::int64_t inner_count =
      shape.stride >= ranks ? 1 : shape.stride / std::gcd(shape.stride, ranks);
  std::vector<std::int64_t> windows;
  for (std::int64_t m = 0; m < block_count; ++m) {
    const std::int64_t first = m * block / ranks;
    const std::int64_t last = ((m + 1) * block - 1) / ranks;
    for (std::int64_t k = first; k <= std::min(last, first + inner_count); ++k) {
      windows.push_back(k);
    }
    windows.push_back(last);
  }
  SortAll(windows);
  windows.erase(std::unique(windows.begin(), windows.end()), windows.end());
  return windows;
}

// Counts for the part [a, b) of a block that lies in the window. Members of the block's groups are
// the residues modulo the stride, so the part touches min(stride, b - a) groups; group o lies in it
// completely when o >= a and its last member o + (size - 1) stride < b.
WindowPart CountPart(GroupShape shape, std::int64_t a, std::int64_t b) {
  const std::int64_t touched = std::min(shape.stride, b - a);
  const std::int64_t first_too_late = std::min(shape.stride, b - (shape.size - 1) * shape.stride);
  const std::int64_t contained = std::max<std::int64_t>(0, first_too_late - a);
  return {touched, touched - contained};
}

WindowPart CountWindow(GroupShape shape, std::int64_t ranks, std::int64_t window) {
  const std::int64_t block = BlockOf(shape);
  const std::int64_t begin = window * ranks;
  const std::int64_t end = begin + ranks;
  WindowPart sum;
  const std::int64_t first = begin / block;
  const std::int64_t last = (end - 1) / block;
  const auto add = [&](std::int64_t m, std::int64_t times) {
    const WindowPart part = CountPart(shape, std::max(begin - m * block, std::int64_t{0}),
                                      std::min(end - m * block, block));
    sum.groups += times * part.groups;
    sum.crossing += times * part.crossing;
  };
  add(first, 1);
  if (last > first) {
    add(last, 1);
  }
  if (last > first + 1) {
    add(first + 1, last - first - 1);  // whole blocks
  }
  return sum;
}

std::int64_t SpannedWindows(GroupShape shape, std::int64_t ranks) {
  if (shape.stride >= ranks) {
    return shape.size;  // no two members share a window
  }
  // Neighbouring members are closer than a window, so no window in between is skipped. A group may
  // start at offset x of a window when x = m * block + o (mod ranks) for some block m and o <
  // stride.
  const std::int64_t granularity = std::gcd(BlockOf(shape), ranks);
  const std::int64_t reach = (shape.size - 1) * shape.stride;
  const std::int64_t latest = ranks - granularity + std::min(shape.stride, granularity) - 1;
  return (latest + reach) / ranks + 1;
}

}  // namespace internal

std::int64_t CrossingGroups(GroupShape shape, std::int64_t ranks) {
  SW_CHECK(shape.size >= 1 && shape.stride >= 1 && ranks >= 1);
  std::int64_t most = 0;
  for (const std::int64_t k : internal::RepresentativeWindows(shape, ranks)) {
    most = std::max(most, internal::CountWindow(shape, ranks, k).crossing);
  }
  return most;
}

GroupPlacement PlaceGroup(GroupShape shape, std::int64_t gpus_per_node) {
  SW_CHECK(shape.size >= 1 && shape.stride >= 1 && gpus_per_node >= 1);
  const std::int64_t g = gpus_per_node;
  const std::int64_t block = BlockOf(shape);
  GroupPlacement placement;
  placement.node_count = internal::SpannedWindows(shape, g);
  placement.ranks_per_node = std::min(shape.size, (g + shape.stride - 1) / shape.stride);
  placement.is_aligned =
      shape.size == 1 ||
      (shape.stride >= g ? shape.stride % g == 0
                         : g % shape.stride == 0 && (block % g == 0 || g % block == 0));
  for (const std::int64_t k : internal::RepresentativeWindows(shape, g)) {
    const internal::WindowPart part = internal::CountWindow(shape, g, k);
    placement.groups_per_node = std::max(placement.groups_per_node, part.groups);
    placement.crossing_groups = std::max(placement.crossing_groups, part.crossing);
  }
  return placement;
}

}  // namespace shardwright
