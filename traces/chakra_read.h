#pragma once

#include <string>
#include <string_view>

#include "traces/recording.h"

namespace shardwright {

// Whether a file that begins so is a Chakra execution trace.
[[nodiscard]] bool IsChakra(std::string_view beginning);

// Reads the Chakra execution trace (schema 0.0.4) of one rank: ours, with the place of every op in
// training, and those that Chakra's converter makes of PyTorch's traces. Where the file has no
// start times, nodes begin as a replay of their dependencies has it. docs/import.md has the rules.
// Throws InputError for damaged files, other schemas and dependencies in a circle.
[[nodiscard]] ProfilerRecording ReadChakra(const std::string& file);

}  // namespace shardwright
