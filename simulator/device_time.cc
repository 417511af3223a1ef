// Sweeps over the beginnings and ends of a step's device ops.
//
// Example: a kernel from 0 to 10, a gather from 6 to 14, a kernel from 20 to 24. Total 24,
// computing 14, uncovered 4 (10 to 14), idle 6, communicating 8, overlapped 4: half of the gather
// is hidden.

#include "simulator/device_time.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

// The kind under which a device op is counted.
enum class Work : std::uint8_t { kCompute, kCollective, kCopy };
constexpr std::size_t kWorks = 3;

Work WorkOf(OpCode code) {
  if (InfoOf(code).is_collective) {
    return Work::kCollective;
  }
  const bool is_copy = code == OpCode::kCopyH2d || code == OpCode::kCopyD2h;
  return is_copy ? Work::kCopy : Work::kCompute;
}

// A kernel begins (+1) or ends (-1).
struct Turn {
  SimTime time;
  Work work;
  int change;
};

}  // namespace

DeviceTime TimeOfDevice(const Program& program, std::span<const Span> spans) {
  SW_CHECK(spans.size() >= program.step.size(), "no step to count");
  std::vector<Turn> turns;
  for (const Span& span : spans.last(program.step.size())) {
    // Stream waits and ops of the host take no time of the device.
    if (span.stream != Stream::kHost && span.end > span.start) {
      const Work work = WorkOf(program.ShapeOf(program.step.ops[span.op.value]).code);
      turns.push_back({span.start, work, 1});
      turns.push_back({span.end, work, -1});
    }
  }
  SortBy(turns, &Turn::time);
  DeviceTime result;
  std::array<int, kWorks> running{};
  const auto runs = [&](Work work) { return running[static_cast<std::size_t>(work)] > 0; };
  for (std::size_t i = 0; i + 1 < turns.size(); ++i) {
    running[static_cast<std::size_t>(turns[i].work)] += turns[i].change;
    const SimTime stretch = turns[i + 1].time - turns[i].time;
    const bool computes = runs(Work::kCompute);
    const bool communicates = runs(Work::kCollective);
    result.total += stretch;
    (computes                            ? result.computing
     : communicates || runs(Work::kCopy) ? result.uncovered
                                         : result.idle) += stretch;
    result.communicating += communicates ? stretch : SimTime(0);
    result.overlapped += communicates && computes ? stretch : SimTime(0);
  }
  return result;
}

}  // namespace shardwright
