#pragma once

// Checks a trace, simulated or measured, against the program that it is said to show.

#include <string>
#include <vector>

#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// What in `trace` contradicts docs/execution_model.md, one line each, at most kMostFindings of
// them; empty = nothing. Each line names rank, step and the ops. Checked are:
//   - every op of a step runs exactly once, all ranks record the same steps;
//   - the times of a span ascend: issue_begin <= issued <= issue_end <= end, issued <= start,
//     arrival <= start <= end;
//   - an op starts after its edges are done, edges carried from the step before included;
//   - ops of one stream run in issue order and do not overlap; nor do the host's actions;
//   - collectives of one communicator run in issue order and do not overlap, on each rank;
//   - the windows of one collective on all its ranks have a moment in common, or touch.
// O(spans + edges).
[[nodiscard]] std::vector<std::string> CheckTrace(const Program& program, const Trace& trace);

inline constexpr std::size_t kMostFindings = 20;

}  // namespace shardwright
