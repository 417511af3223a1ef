#pragma once

// What happened, or would happen, when a program ran: one span per op, and how much memory existed.
// The simulator and the executor both write it, so that predicted and measured spans join by op id.

#include <array>
#include <cstdint>
#include <vector>

#include "core/units.h"
#include "schedule/program.h"

namespace shardwright {

// Which body of the program a span's op belongs to.
enum class BodyKind : std::uint8_t { kInit, kWarmup, kStep };
[[nodiscard]] inline const Body& BodyOf(const Program& program, BodyKind kind) {
  return kind == BodyKind::kInit     ? program.init
         : kind == BodyKind::kWarmup ? program.warmup
                                     : program.step;
}

// One run of one op on one rank. All times count from the start of the recording, in one clock.
// Waiting splits exactly (docs/execution_model.md, section 4): until `issued` for the host, until
// `ready` for its edges and the queue, from `arrival` to `start` for a peer.
struct Span {
  std::uint32_t step = 0;  // 0 = first step (init counts as step 0)
  Rank rank{0u};
  BodyKind body = BodyKind::kStep;
  Stream stream = Stream::kHost;
  OpId op;              // index into the body
  SimTime issue_begin;  // the host begins to issue it
  SimTime issued;       // its first launch is in the queue
  SimTime issue_end;    // the host has issued all of it
  SimTime ready;        // stream predecessor and all edges done
  SimTime arrival;      // this rank could start (collectives: the communicator was free as well)
  SimTime start;        // it started; for a collective, when its last rank arrived
  SimTime end;
  // What its thread computed of that, where ops run on cores: the rest it waited, for a core or for
  // others. Threads that share it count, too, so it may be more than it lasted. 0: not measured.
  SimTime cpu;

  bool operator==(const Span&) const = default;
};

// Bytes that existed at one moment of host time, by category.
struct MemorySample {
  std::uint32_t step = 0;
  Rank rank{0u};
  SimTime time;
  std::array<Bytes, kCategoryCount> device{};
  std::array<Bytes, kCategoryCount> host{};
  Bytes reserved{0};  // by the caching allocator, where it was simulated; else 0

  bool operator==(const MemorySample&) const = default;
};

struct Trace {
  std::vector<Span> spans;           // by (rank, step), then in issue order
  std::vector<MemorySample> memory;  // by (rank, time)
};

}  // namespace shardwright
