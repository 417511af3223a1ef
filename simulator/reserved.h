#pragma once

// Memory that PyTorch's caching allocator reserves for a program: its alloc and free points
// replayed with simulated times.

#include <cstdint>
#include <span>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "simulator/caching_allocator.h"
#include "simulator/engine.h"
#include "traces/trace.h"

namespace shardwright {

struct ReservedMemory {
  Bytes peak_init;    // reserved at most in init
  Bytes peak_first;   // in init and the first step
  Bytes peak_steady;  // in later steps
  std::int64_t retries_first = 0;
  std::int64_t retries_steady = 0;  // per step
  bool out_of_memory = false;       // an allocation failed even after a retry
  // Reserved behind each group of memory points of the spans, in the order of AppendMemorySamples;
  // of the last step, its last replay.
  std::vector<Bytes> timeline;

  bool operator==(const ReservedMemory&) const = default;
};

struct DriverCosts {
  SimTime malloc;  // one cudaMalloc
  SimTime free;    // one cudaFree
};

// Replays init, the first step and then the last step of `spans` (as from RunEngineWithSpans) until
// a step reserves no more than the one before, or leaves the allocator as that did. `stalls` holds
// the host time that the spans already contain before each op, and receives what this replay says.
// The times are right when the two agree. Frees with recorded streams wait for all work queued on
// those streams at that point. `until_full`: ends with the first allocation that fails.
[[nodiscard]] ReservedMemory ReplayAllocator(const Program& program, std::span<const Span> spans,
                                             SimTime period, const AllocatorOptions& options,
                                             const DriverCosts& costs, HostStalls& stalls,
                                             bool until_full = false);

}  // namespace shardwright
