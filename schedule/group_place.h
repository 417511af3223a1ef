#pragma once

#include <cstdint>

#include "schedule/program.h"

namespace shardwright {

// A rank's place in its group of a kind: members are base + i * stride.
struct GroupPlace {
  std::int64_t base = 0;
  std::int64_t index = 0;
};
[[nodiscard]] inline GroupPlace PlaceInGroup(const Group& group, Rank rank) {
  const auto r = static_cast<std::int64_t>(rank.value);
  const std::int64_t index = r / group.stride % group.size;
  return {r - index * group.stride, index};
}

}  // namespace shardwright
