#pragma once

// Text forms of a program, for people, golden tests and diffs. Equal programs give equal text, and
// lines name ops and buffers instead of numbering them, so that a change shows only where it is.

#include <string>
#include <vector>

#include "schedule/program.h"

namespace shardwright {

// "activation@mb0.layers.3.attn.fwd#1": category, the op before which the buffer is first
// allocated, and "#n" for the n-th further buffer of this category there. Ops of other bodies than
// `step` carry the body's name: "parameter_shard@init/layers.3.init.initialize". O(points).
[[nodiscard]] std::string BufferName(const Program& program, BufferId buffer);
// The names of all buffers, in one go.
[[nodiscard]] std::vector<std::string> BufferNames(const Program& program);

// The whole program: header, groups, units, buffers, then the three bodies; each op with its
// stream and sizes, and below it the memory points before it, edges, accesses and kernels.
[[nodiscard]] std::string Print(const Program& program);

// Counts and sizes: ops per body and stream, collectives per group, buffers per category, repeats.
[[nodiscard]] std::string PrintSummary(const Program& program);

}  // namespace shardwright
