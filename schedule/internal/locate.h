#pragma once

// Finds and names ops of the concatenation for findings. Slow on purpose: it scans, so that the
// walk that looks for findings need not remember anything for their sake.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "schedule/happens_before.h"
#include "schedule/program.h"

namespace shardwright {

// An op of a pass; an op id that equals the body's size stands for the end of the pass.
struct Position {
  std::size_t pass = 0;
  OpId op;
};

inline constexpr const char* kNoOp = "(none)";

// "step 1: mb0.layers.3.fwd", or "step 1: end".
[[nodiscard]] std::string NameAt(const Program& program, std::span<const Pass> passes,
                                 Position position);

// The `number`-th op (from 1) that the concatenation issues to `stream`. It must exist.
[[nodiscard]] Position FindInStream(const Program& program, std::span<const Pass> passes,
                                    Stream stream, std::int32_t number);

// The last free point (or alloc point of either kind) of `buffer` up to `here`, and before `self`
// when that is a point; none if there is none.
[[nodiscard]] std::optional<Position> FindPointBefore(std::span<const Pass> passes, BufferId buffer,
                                                      bool is_free, Position here,
                                                      const MemoryPoint* self);
// The first alloc point of `buffer` in the whole concatenation.
[[nodiscard]] std::optional<Position> FindFirstAlloc(std::span<const Pass> passes, BufferId buffer);

}  // namespace shardwright
