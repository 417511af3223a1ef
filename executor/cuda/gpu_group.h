#pragma once

// Collectives of one group of ranks on the GPU's streams. Two implementations: loopback, whose
// ranks are threads on one GPU (executor/cuda/loopback.h), and NCCL, whose ranks are processes with
// a GPU each (executor/cuda/nccl_world.h).

#include <cstdint>
#include <string>

#include "executor/call.h"
#include "executor/cuda/gpu.h"

namespace shardwright {

// Where a member's part of a collective runs. Events are the member's own, for this group alone.
struct CollectivePlace {
  Gpu& gpu;
  GpuStream stream;
  GpuEvent ready, summed, done;
  // Timed, null where nobody asks: recorded again by a group that knows when all members are there.
  GpuEvent start = {};
};

class GpuGroup {
 public:
  GpuGroup() = default;
  GpuGroup(const GpuGroup&) = delete;
  GpuGroup& operator=(const GpuGroup&) = delete;
  virtual ~GpuGroup() = default;

  // Each member calls it from its host thread, all with the same collectives in the same order. The
  // GPU does not wait for the host. `name` outlives the collective. Throws RunError when another
  // rank fails, does not come in time, or comes with another collective.
  virtual void Submit(std::int64_t member, const CollectiveCall& call, const std::string& name,
                      const CollectivePlace& place) = 0;
};

}  // namespace shardwright
