#pragma once

#include "executor/host/message_passing.h"
#include "traces/trace.h"

namespace shardwright {

// The traces of all processes as one, on process 0; an empty one on the others. Called by all
// processes.
[[nodiscard]] Trace CollectTrace(MessagePassing& processes, const Trace& mine);

}  // namespace shardwright
