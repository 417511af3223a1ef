#pragma once

#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// Completes a trace of GPUs, where a span on a GPU's stream says when its work began and ended on
// its own rank and nothing of why it began no earlier: ready, arrival and, for collectives, a start
// at which the last rank had come (docs/execution_model.md, sections 1 and 4). A span whose end is
// 0 did nothing on the GPU; it begins and ends when it could. Order as in Trace, all ranks of the
// program. O(spans + edges).
void DeriveWaits(const Program& program, Trace& trace);

// For a trace that says of a collective when each rank's part of the work ended, where no rank goes
// on before all parts are over: gives all of them the last end.
void EndTogether(const Program& program, Trace& trace);

}  // namespace shardwright
