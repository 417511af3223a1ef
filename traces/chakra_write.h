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

// "FOLDER/step.N.et" for every rank, with the program's step and the times of the last step of
// `trace`, which has the spans of one rank class; and "FOLDER/comm_groups.json". Throws InputError
// when there are more than kMostChakraRanks ranks.
[[nodiscard]] std::vector<OutputFile> ChakraFiles(const Program& program, const Trace& trace,
                                                  const std::string& folder);

}  // namespace shardwright
