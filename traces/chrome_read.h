#pragma once

// Reads back what WriteChromeTrace wrote.

#include <string>

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

}  // namespace shardwright
