#pragma once

// Host memory and seconds that loading a model and saving a checkpoint take, beside the steps.

#include <string>
#include <vector>

#include "core/units.h"
#include "schedule/plan_file.h"

namespace shardwright {

// What a node's storage reads and writes when nobody says otherwise: a shared file system under
// many readers.
inline constexpr BytesPerSecond kUsualStorage{1e9};

// One way to load or to save, of which tests/python/host_start_test.py measures the peaks with
// torch. P bytes of parameters as they are trained, S with the optimizer's states, 8 ranks a node:
// every rank the whole model 8 P; rank 0 alone P; whole state dict S; async_save 8 S / shards.
// DCP's load and save pass tensor by tensor and hold a few at a time.
struct HostMove {
  std::string what;
  Bytes peak;    // of the node that holds most
  Seconds time;  // the storage's; behind it, or beside it where both stream, copies and broadcasts
};

// O(parameters).
[[nodiscard]] std::vector<HostMove> HostMoves(const PlanFile& file);

}  // namespace shardwright
