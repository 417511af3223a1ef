#pragma once

// A text form of allocator tests: calls, and the segment lists and counters expected after them.
//
//   options capacity=1GiB max_split_size=32MiB gc_threshold=0.5 expandable_segments
//   alloc NAME SIZE [stream=0] [at=TIME] [mallocs=0] [frees=0] [retry=FREED_BYTES [sync=TIME]]
//   [oom] free NAME [use=STREAM@TIME ...] segments            then one line per segment in address
//   order, then `end`
//     small|large sSTREAM: NAME=SIZE free=SIZE waiting=SIZE unmapped=SIZE ...
//   counters KEY=VALUE ...
// `options` comes first. What an alloc line does not say is expected to be as shown in the
// brackets: no driver call, no retry, no failure. Sizes are sums of terms such as 20MiB-1.5MiB+512.
// Times are in picoseconds; `at` stays until the next one. `#` starts a comment.

#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Runs a script and returns one line "<name>:<line>: ..." for each expectation that fails; empty is
// success. Throws std::runtime_error for a line that it cannot read.
[[nodiscard]] std::vector<std::string> RunAllocatorScript(std::string_view name,
                                                          std::string_view text);

}  // namespace shardwright
