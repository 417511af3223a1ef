#pragma once

// How the device spends a step, counted as Holistic Trace Analysis counts kernels in a trace: by
// what runs at a moment on any stream, whatever waits for it.

#include <span>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// total = computing + uncovered + idle.
struct DeviceTime {
  SimTime total;          // from the first op's start to the last op's end
  SimTime computing;      // kernels that are no collectives run, on any stream
  SimTime uncovered;      // collectives or copies between host and device run, and no such kernel
  SimTime idle;           // nothing runs
  SimTime communicating;  // collectives run
  SimTime overlapped;     // collectives and other kernels run

  // Share of the communication beside which something is computed; 1 without communication.
  [[nodiscard]] double Overlap() const {
    return communicating > SimTime(0) ? Ratio(overlapped, communicating) : 1.0;
  }
  bool operator==(const DeviceTime&) const = default;
};

// Of the last step in `spans` (as from RunEngineWithSpans), taken by itself: what other steps run
// meanwhile does not count. O(n log n).
[[nodiscard]] DeviceTime TimeOfDevice(const Program& program, std::span<const Span> spans);

}  // namespace shardwright
