#pragma once

// The mutation test of Verify, for any program.

#include <cstddef>
#include <map>
#include <string>

#include "schedule/program.h"
#include "tests/schedule/mutate.h"

namespace shardwright {

struct MutantCounts {
  std::map<Mutation, std::size_t> legal;
  std::map<Mutation, std::size_t> illegal;
  std::size_t swaps_legal = 0;
  std::size_t swaps_illegal_alone = 0;     // the swapped rank is illegal by itself
  std::size_t swaps_illegal_together = 0;  // only the two ranks together are

  [[nodiscard]] std::string Text() const;
};

// Checks that the program is legal, that Verify and the brute force agree on every mutant, and that
// each rejection names both ops and the buffer. `stride`: look at every stride-th mutant only.
void CheckMutants(const Program& program, MutantCounts& counts, std::size_t stride = 1);

}  // namespace shardwright
