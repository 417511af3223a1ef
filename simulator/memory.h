#pragma once

// How much memory a program's buffers take, as the host sees it: a buffer exists from its alloc
// point to its free point, whatever the clock says (docs/execution_model.md, section 2).

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"
#include "traces/trace.h"

namespace shardwright {

// The moment when most bytes existed, the earliest if there are several.
struct MemoryPeak {
  Bytes total;
  std::array<Bytes, kCategoryCount> by_category{};
  BodyKind body = BodyKind::kInit;
  OpId before_op;  // the peak stands just before this op is issued; none: at the body's end

  bool operator==(const MemoryPeak&) const = default;
};

// Init counts into the first step, and stands alone, too.
struct AllocatedMemory {
  MemoryPeak device_init, host_init;
  MemoryPeak device_first, device_steady;
  MemoryPeak host_first, host_steady;

  // The larger of the two.
  [[nodiscard]] const MemoryPeak& DevicePeak() const;
  [[nodiscard]] const MemoryPeak& HostPeak() const;
  bool operator==(const AllocatedMemory&) const = default;
};

// Scratch memory that calls reuse.
struct MemoryWorkspace {
  std::uint64_t call = 0;
  std::vector<std::uint64_t> made_in;  // by buffer: the last call that came to its alloc_once point
};

// Peaks of init, of init with the first step, and of the steady step. Requires a program that
// Verify accepts. O(points).
[[nodiscard]] AllocatedMemory MeasureAllocated(const Program& program, MemoryWorkspace& workspace);

// One buffer that exists at a peak.
struct PeakBuffer {
  BufferId buffer;
  Bytes size;
  Category category = Category::kTemporary;
  std::string allocated_by;         // name of the op before which it was allocated
  BodyKind body = BodyKind::kInit;  // the body that allocated it
};
// The device buffers that exist at `peak`, largest first, then in order of allocation. `is_first`
// says which step the peak belongs to. O(points).
[[nodiscard]] std::vector<PeakBuffer> ExplainPeak(const Program& program, const MemoryPeak& peak,
                                                  bool is_first);

// One sample after each group of points of the steps that `spans` covers, in their order, at the
// host time of the op behind the points. `spans` as from RunEngineWithSpans.
void AppendMemorySamples(const Program& program, std::span<const Span> spans,
                         std::vector<MemorySample>& samples);

}  // namespace shardwright
