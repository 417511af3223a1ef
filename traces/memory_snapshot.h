#pragma once

// CUDA memory snapshots, the pickles of torch.cuda.memory._dump_snapshot. Nothing in them is ever
// run: opcodes that call, import or build are refused.

#include <cstdint>
#include <string>
#include <vector>

#include "core/units.h"
#include "traces/recording.h"

namespace shardwright {

struct MemorySite {
  std::string name;  // a category ("optimizer"), or "model.py:17 forward"
  Bytes bytes;       // allocated at the peak
};

// Of one device.
struct DeviceSnapshot {
  std::int64_t device = 0;
  std::vector<AllocatorSample> samples;  // after each event; time 0 at the first one
  Bytes peak_allocated, peak_reserved;   // peaks of the recording, what was there before included
  SimTime peak_time;                     // of peak_allocated
  Bytes allocated, reserved;             // at the end
  std::int64_t out_of_memory = 0;        // events
  std::vector<MemorySite> categories;    // at the peak, largest first; they add up to it
  std::vector<MemorySite> sites;         // the largest call sites at the peak
};

struct MemorySnapshot {
  std::string file;
  std::vector<DeviceSnapshot> devices;  // those with segments or events
  std::vector<std::string> notes;
};

// Requires a pickle of protocol 2 to 5. Throws InputError for code, damaged files and pickles that
// are no snapshot. O(file); memory a few times the file.
[[nodiscard]] MemorySnapshot ReadMemorySnapshot(const std::string& file);

}  // namespace shardwright
