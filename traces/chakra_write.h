#pragma once

// Writes a step as Chakra execution traces (schema 0.0.4, a file per rank), which ASTRA-sim runs.
// docs/trace_format.md describes every node.

#include <string>
#include <vector>

#include "core/writable.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// Files are as many as ranks.
inline constexpr std::int64_t kMostChakraRanks = 1024;

// The trace of rank `rank`: ops of the program's step with the times of the last step of `trace`.
// Requires a trace of `program` with the spans of one rank class.
[[nodiscard]] std::string ChakraTrace(const Program& program, const Trace& trace,
                                      std::int64_t rank);

// ASTRA-sim's --comm-group-configuration: the ranks of every process group that a pg_name names.
[[nodiscard]] std::string ChakraGroups(const Program& program);

// "FOLDER/step.N.et" for every rank, and "FOLDER/comm_groups.json". Throws InputError when there
// are more than kMostChakraRanks ranks.
[[nodiscard]] std::vector<OutputFile> ChakraFiles(const Program& program, const Trace& trace,
                                                  const std::string& folder);

}  // namespace shardwright
