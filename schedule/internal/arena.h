#pragma once

// Packs the lives of one body into one range of bytes.

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/happens_before.h"
#include "schedule/program.h"

namespace shardwright {

// A life to place. Positions are host positions in the body.
struct ArenaItem {
  std::uint32_t buffer = 0;
  int level = 0;             // lives of a lower level are placed first; level 0 has its place
  std::int64_t size = 0;     // rounded up to the alignment
  std::int64_t offset = -1;  // -1: not placed yet
  std::int32_t birth = 0;    // first use; -1: exists when the body begins
  std::int32_t last_use = 0;
  Stream stream = Stream::kCompute;  // of the first use
  // Clock comparisons as numbers: a later birth b on stream s comes after all uses of this life
  // exactly if b's position is at least release[s]. kNever if no birth does.
  std::array<std::int32_t, kStreamCount> release{};
  // The next run of the body: this life's uses must also come before the next run's first use of
  // whatever holds the bytes first there.
  bool precedes_next_run = true;  // all uses come before all births of the next run
  bool follows_last_run = true;   // its birth comes after all uses of the last run
  Clock last;                     // for the exact comparison where the two flags do not decide
  Clock before_next_birth;        // before_birth of this buffer in the next run

  static constexpr std::int32_t kNever = 0x7fffffff;
};

// Gives every item an offset of at least `base`: level by level, within a level in order of birth,
// each into the smallest gap that it fits, the lowest of equal ones. `items` are sorted by birth.
// Returns the end of the highest item.
std::int64_t PackArena(std::vector<ArenaItem>& items, std::int64_t base);

}  // namespace shardwright
