#pragma once

// Random legal programs for tests: all streams, carried edges and buffers, collectives on several
// groups, host and stream waits, recorded streams, alloc_once, offload, an optional warm-up.

#include <cstdint>

#include "schedule/program.h"

namespace shardwright {

struct RandomProgramOptions {
  int max_units = 3;
  int max_micro_batches = 2;
  int ops_per_unit = 2;  // compute ops of a unit's forward, at most
  // Percentage of edges added although the order holds already. Deleting such an edge is legal.
  int redundant_edge_percent = 10;
};

// Legal by docs/execution_model.md section 3: the writer adds an edge, a wait or a recorded stream
// wherever two accesses or a free need it, mostly no more than that. The same seed gives the same
// program on every machine.
[[nodiscard]] Program RandomProgram(std::uint64_t seed, const RandomProgramOptions& options = {});

}  // namespace shardwright
