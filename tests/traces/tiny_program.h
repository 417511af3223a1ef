#pragma once

// A program of one layer and a trace of it with times set by hand, for tests of traces.

#include <string>

#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright::testing {

// Two ranks shard one layer. `unit` and `model_op` become part of op names. Ops of the step:
//   0 <unit>.fwd.all_gather        gather stream; edge to slot 0
//   1 <model_op>.fwd               compute; edge to 0
//   2 <model_op>.bwd               compute
//   3 <unit>.bwd.reduce_scatter    reduce; edge to 2; same group as 0
//   4 opt.optimizer_step           compute; edge to 3; sets slot 0
//   5 opt.host_wait                host; edge to 4
// Init is one op on compute.
[[nodiscard]] Program TinyProgram(const std::string& unit, const std::string& model_op);

// Init and two steps on both ranks, as the execution model has them. Times are whole microseconds.
[[nodiscard]] Trace TinyTrace();

}  // namespace shardwright::testing
