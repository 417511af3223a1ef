#pragma once

#include <cstdint>
#include <vector>

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

// The members of the rank's group.
[[nodiscard]] inline std::vector<std::int64_t> MembersOf(const Group& group, std::int64_t rank) {
  const std::int64_t block = group.size * group.stride;
  std::vector<std::int64_t> ranks;
  for (std::int64_t i = 0; i < group.size; ++i) {
    ranks.push_back(rank / block * block + rank % group.stride + i * group.stride);
  }
  return ranks;
}

}  // namespace shardwright
