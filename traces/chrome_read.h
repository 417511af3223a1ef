#pragma once

// Reads back what WriteChromeTrace wrote.

#include <optional>
#include <string>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// The trace in `file` (plain or gzip), joined with `program` by op name. Times are whole
// nanoseconds: those of the written trace, rounded. Spans come back in their order, whatever the
// order in the file.
//
// Throws InputError with the place for damaged files, traces of other programs, traces that
// Shardwright did not write, and those of the profile kHta, whose times are not exact. Events
// stream through, so that memory grows with the spans and not with the file.
[[nodiscard]] Trace ReadChromeTrace(const std::string& file, const Program& program);

// What a trace says about itself.
struct TraceHeader {
  std::string source;                // "simulated", "host", ...
  std::string plan;                  // text of the plan file it belongs to; empty: not recorded
  std::optional<SimTime> step_time;  // of a simulation: the period of the steady state
};

// Reads what stands before the events, whatever the size of the file. Throws like ReadChromeTrace.
[[nodiscard]] TraceHeader ReadTraceHeader(const std::string& file);

}  // namespace shardwright
