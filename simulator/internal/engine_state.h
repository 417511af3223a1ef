#pragma once

// The event loop's view of a program and its prices, and its state in a run. Plain integers in
// picoseconds, since these are the inner loops; docs/execution_model.md names the rules.

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "schedule/program.h"
#include "simulator/costs/contention.h"
#include "simulator/costs/price.h"
#include "simulator/engine.h"

namespace shardwright::internal {

inline constexpr std::uint32_t kNone = 0xffffffffu;
inline constexpr auto kCompute = static_cast<std::uint8_t>(Stream::kCompute);
inline constexpr std::int64_t kNotDone = std::numeric_limits<std::int64_t>::max();
// When something ended that never was: before everything else, whatever is added to it.
inline constexpr std::int64_t kNever = -(std::int64_t{1} << 60);

// A shape and its price, as the inner loops need them.
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

// Times must stay inside SimTime, +-106 days, also where `ranks` that may wait for each other run
// one behind the other. Throws InputError.
void CheckRange(const Program& program, const std::vector<Cost>& costs,
                const EngineOptions& options, std::size_t ranks);

// Body::EdgesOf for inner loops.
[[nodiscard]] inline std::span<const Edge> EdgesOf(const Body& body, std::uint32_t op) {
  const std::size_t end =
      op + 1 < body.ops.size() ? body.ops[op + 1].edge_begin : body.edges.size();
  const std::size_t begin = body.ops[op].edge_begin;
  return {body.edges.data() + begin, end - begin};
}

// One run of a body. Its op i has the number base + i among all ops of the simulation.
struct BodyRun {
  const Body* body = nullptr;
  BodyKind kind = BodyKind::kStep;
  std::uint32_t step = 0;
  std::uint32_t base = 0;
  std::uint32_t issued = 0;      // ops [0, issued) have been issued
  std::uint32_t unfinished = 0;  // ops that have not ended
  std::size_t stall_cursor = 0;  // entries of its stalls that are over
  std::size_t slot_begin = 0;    // its carry slots in EventState::slots
  std::int64_t host_end = 0;     // the host clock after its last issue
  std::int64_t last_end = 0;     // the latest end of its ops so far
  StepTiming totals;             // over its ops; without the time

  [[nodiscard]] bool IsComplete() const { return unfinished == 0 && issued == body->size(); }
};

// Times of one issued op.
struct OpRecord {
  std::int64_t issued = 0;
  std::int64_t issue_end = 0;
  std::int64_t start = 0;
  std::int64_t end = 0;
  std::uint32_t next_on_stream = kNone;
  std::uint32_t before_in_group = kNone;  // the collective before it on its communicator
};

// The class of the op on stream s in byte s.
__extension__ using RunningKey = unsigned __int128;

// Speeds by set of running classes, as they are solved. Open addressing; emptied when half full.
struct SpeedCache {
  struct Entry {
    RunningKey key = 0;  // 0 = no entry
    Speeds speeds{};
  };
  std::vector<Entry> entries;
  std::size_t used = 0;
};

// Memory that runs reuse.
struct EventState {
  std::vector<Cost> costs;
  std::vector<OpRecord> records;  // by op number
  std::vector<BodyRun> runs;
  std::vector<std::uint32_t> slots;          // op numbers, kNone = nothing set the slot
  std::vector<std::uint32_t> last_in_group;  // by communicator
  SpeedCache cache;
};

}  // namespace shardwright::internal
