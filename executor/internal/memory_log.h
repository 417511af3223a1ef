#pragma once

// How many bytes of each category exist as the host walks a program.

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

class MemoryLog {
 public:
  explicit MemoryLog(const Program& program)
      : program_(program), allocated_once_(program.buffers.size(), false) {}

  // Applies the points that stand before an op, or at a body's end.
  void Apply(std::span<const MemoryPoint> points);
  // What exists now.
  [[nodiscard]] MemorySample Sample(std::uint32_t step, Rank rank, SimTime time) const;

 private:
  const Program& program_;
  std::vector<bool> allocated_once_;  // by buffer
  std::array<Bytes, kCategoryCount> device_{}, host_{};
};

}  // namespace shardwright
