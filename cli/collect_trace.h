#pragma once

#include "cli/run_session.h"
#include "executor/host/message_passing.h"
#include "traces/trace.h"

namespace shardwright {

// The traces of all processes as one, on process 0; an empty one on the others. Called by all
// processes.
[[nodiscard]] Trace CollectTrace(MessagePassing& processes, const Trace& mine);
// What a session recorded on all ranks, complete. `processes` may be null; else as above.
[[nodiscard]] Trace TakeWholeTrace(RunSession& session, const Program& program,
                                   MessagePassing* processes);

}  // namespace shardwright
