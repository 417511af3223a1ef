#pragma once

// Fixed offsets for all buffers of a program, so that running it needs no allocator.

#include <vector>

#include "core/units.h"
#include "schedule/program.h"

namespace shardwright {

struct PlaceOptions {
  // Offsets and the room of each buffer are multiples of this; a power of two. 256 B is what CUDA
  // guarantees for cudaMalloc and what vector loads and symmetric memory want.
  Bytes alignment{256};
};

// Two arenas, one on the device and one on the host (for buffers with on_host).
struct Placement {
  Bytes device_size{0};
  Bytes host_size{0};
  std::vector<Bytes> offsets;  // by buffer, in its arena

  bool operator==(const Placement&) const = default;
};

// Bytes are shared by two buffers only if every use of one happens before every use of the other
// already, within a step and from each step to the next: no edge is added. Requires a program that
// Verify accepts. A function of the program alone, so equal on all ranks of a class. Buffers that
// live on from step to step, zero-filled ones, and those whose lives do not fit one pattern get
// bytes of their own. See docs/execution_model.md section 2. O(buffers * arena segments) at worst,
// which vector clocks and few segments keep to milliseconds for thousands of buffers.
[[nodiscard]] Placement Place(const Program& program, const PlaceOptions& options = {});

// The largest sum of sizes of the device buffers that exist at one moment of host order, from alloc
// to free, in init, warmup or the steps, each rounded up to `alignment`. An arena can be smaller,
// since it counts uses. O(points).
[[nodiscard]] Bytes PeakAllocated(const Program& program, Bytes alignment = Bytes(1));

// The same from first to last use: no placement can be below. O(accesses).
[[nodiscard]] Bytes PeakInUse(const Program& program);

}  // namespace shardwright
