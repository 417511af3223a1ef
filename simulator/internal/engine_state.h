#pragma once

// Data that both engines share: costs by shape, clocks, totals. Plain integers in picoseconds,
// since these are the inner loops; docs/execution_model.md names the rules.

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "schedule/program.h"
#include "schedule/repetition.h"
#include "simulator/costs/price.h"
#include "simulator/engine.h"

namespace shardwright::internal {

inline constexpr std::uint32_t kNone = 0xffffffffu;
inline constexpr auto kCompute = static_cast<std::uint8_t>(Stream::kCompute);
inline constexpr std::int64_t kNotDone = std::numeric_limits<std::int64_t>::max();
// When something ended that never was: before everything else, whatever is added to it.
inline constexpr std::int64_t kNever = -(std::int64_t{1} << 60);
inline constexpr std::size_t kMaxGroups = 32;  // communicators of a program

// What the inner loops need of a shape and its price.
struct Cost {
  std::int64_t duration = 0;
  std::int64_t issue = 0;
  std::int64_t first = 0;  // device ops: first launch; host ops: wake-up latency
  std::int64_t tail = 0;
  std::uint32_t group = kNone;  // communicator of a collective
  std::uint8_t stream = 0;
  std::uint8_t contention_class = 0;
  bool on_host = false;
};

// Fills `costs` from the program's shapes and their prices.
void BuildCosts(const Program& program, const PriceTable& prices, std::vector<Cost>& costs);

// Whether the host runs ops itself, which can block it.
[[nodiscard]] bool HasHostOps(const std::vector<Cost>& costs);

// When the host, the streams and the communicators become free.
struct Clock {
  std::int64_t host = 0;
  std::array<std::int64_t, kStreamCount> stream{};
  std::array<std::int64_t, kMaxGroups> group{};

  // The moment by which everything is complete.
  [[nodiscard]] std::int64_t Front() const;
};

// Sums over ops; see StepTiming.
struct Totals {
  std::array<std::int64_t, kStreamCount> busy{};
  std::array<std::int64_t, kStreamCount> compute_idle{};
  std::int64_t collectives_on_compute = 0;
  std::int64_t host_blocked = 0;
  std::int64_t host_issue = 0;
};

// Body::EdgesOf for inner loops.
[[nodiscard]] inline std::span<const Edge> EdgesOf(const Body& body, std::uint32_t op) {
  const std::size_t end =
      op + 1 < body.ops.size() ? body.ops[op + 1].edge_begin : body.edges.size();
  const std::size_t begin = body.ops[op].edge_begin;
  return {body.edges.data() + begin, end - begin};
}

// A body and where it repeats itself.
struct CutBody {
  const Body* body = nullptr;
  const Repetition* cuts = nullptr;

  [[nodiscard]] std::uint32_t SegmentEnd(std::size_t segment) const {
    return segment + 1 < cuts->segments.size() ? cuts->segments[segment + 1].first
                                               : static_cast<std::uint32_t>(body->size());
  }
};

// *this + more, and *this + count * (after - before), member by member.
void Add(Totals& totals, const Totals& more);
void AddScaled(Totals& totals, const Totals& before, const Totals& after, std::int64_t count);
void AddScaled(Clock& clock, const Clock& before, const Clock& after, std::int64_t count);

[[nodiscard]] StepTiming ToStepTiming(const Totals& before, const Totals& after, std::int64_t time);

// What a compute op waited for between the end of its predecessor and its start.
struct Gap {
  std::int64_t previous_end = 0;
  std::int64_t issued = 0;
  std::int64_t start = 0;
};
// Charges the gap: until `issued` to the host, the rest to `stream` of the edge that was last.
void ChargeGap(Totals& totals, const Gap& gap, std::uint8_t stream);

}  // namespace shardwright::internal
