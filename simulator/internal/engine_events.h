#pragma once

// The engine with contention: a loop over events in time order. State only; see engine_events.cc.

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/program.h"
#include "simulator/costs/contention.h"
#include "simulator/internal/engine_state.h"
#include "traces/trace.h"

namespace shardwright::internal {

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
  std::int64_t host_begin = 0;   // the host clock before its first issue
  std::int64_t host_end = 0;     // the host clock after its last issue
  std::int64_t last_end = 0;     // the latest end of its ops so far
  Totals totals;
};

// The oldest unfinished op of a stream.
struct StreamHead {
  enum class Status : std::uint8_t { kEmpty, kUnknown, kBlocked, kTimed, kRunning };
  Status status = Status::kEmpty;
  std::uint32_t op = kNone;       // number among all ops
  std::uint32_t run = 0;          // index of its BodyRun
  std::uint32_t blocker = kNone;  // kBlocked: an op it waits for
  const Cost* cost = nullptr;
  std::int64_t time = 0;       // kTimed: when it can start; kRunning: when it will end
  std::int64_t since = 0;      // kRunning: `remaining` holds at this moment
  double remaining = 0;        // kRunning: work in picoseconds of running alone
  double speed = 0;            // kRunning
  std::int64_t end_bound = 0;  // ends no earlier, because of its launches
  std::int64_t work_end = 0;   // kRunning: when the work is done at this speed
};

// Times of one issued op.
struct EventRecord {
  std::int64_t issued = 0;
  std::int64_t issue_end = 0;
  std::int64_t start = 0;
  std::uint32_t next_on_stream = kNone;
  std::uint32_t before_in_group = kNone;  // the collective before it on its communicator
};

// Speeds by set of running classes, as they are solved. Open addressing;
// emptied when half full.
struct SpeedCache {
  struct Entry {
    std::uint64_t key = 0;  // class of the op on stream s in byte s; 0 = no entry
    Speeds speeds{};
  };
  std::vector<Entry> entries;
  std::size_t used = 0;
};

// Where a stream looks for its next op, when the host never waits.
struct StreamCursor {
  std::uint32_t run = 0;
  std::uint32_t next = 0;  // first op of the run's body not looked at yet
  std::size_t repeat = 0;  // first of the body's repeats that does not begin before `next`
  std::int64_t host = 0;   // the host clock before that op is issued
  bool is_done = false;    // the step has no ops on this stream
};

// The state of the event loop when the compute stream starts the first op of a copy: what the
// future depends on, relative to that copy and that moment. Unless anything waits for the host, two
// copies with equal anchors go on equally.
struct Anchor {
  struct StreamPosition {
    StreamHead::Status status = StreamHead::Status::kEmpty;
    bool is_inside = false;  // the head is an op of the repeat
    std::int64_t op = 0;     // inside: counted from the first op of the copy; else its number
    double remaining = 0;    // kRunning: work left ...
    std::int64_t age = 0;    // ... this long ago
    bool operator==(const StreamPosition&) const = default;
  };
  std::array<StreamPosition, kStreamCount> streams;
  std::int64_t time = 0;
  std::int64_t issued = 0;       // when the copy's first compute op was issued
  std::uint32_t unfinished = 0;  // of the run
  Totals totals;                 // of the run
};

// A repeat whose copies the compute stream is in.
struct ActiveRepeat {
  std::uint32_t run = 0;
  Repeat repeat;
  std::uint32_t copy = 0;         // the copy whose anchor is `anchor`
  std::uint32_t next_anchor = 0;  // index in the body from which on the next anchor is due
  bool has_anchor = false;
  bool is_due = false;                  // an anchor is to be taken
  std::int64_t issue_slack = kNotDone;  // since `anchor`
  Anchor anchor;
};

// A state at the start of a repeat, to be compared with the same point of the next step.
struct StepPoint {
  std::uint32_t op = 0;  // the compute op that starts, as index in the body
  std::array<Anchor::StreamPosition, kStreamCount> streams;  // ops counted from the body's first
  std::int64_t time = 0;
  std::int64_t issued = 0;
  bool lags = false;                    // ops of earlier runs are unfinished
  std::int64_t issue_slack = kNotDone;  // since then; see ActiveRepeat
  Totals totals;                        // of all runs
};

struct EventState {
  std::vector<std::int64_t> end;  // kNotDone while an op has not ended
  std::vector<EventRecord> records;
  std::vector<BodyRun> runs;
  std::vector<std::uint32_t> slots;  // op numbers, kNone = nothing set the slot
  std::array<StreamHead, kStreamCount> heads;
  std::array<std::uint32_t, kStreamCount> last_on_stream{};
  std::array<std::int64_t, kStreamCount> stream_free{};
  std::array<std::uint32_t, kMaxGroups> last_in_group{};
  std::array<StreamCursor, kStreamCount> cursors;
  std::vector<ActiveRepeat> repeats;       // outer ones first
  std::vector<StepPoint> points;           // of the present step run
  std::vector<StepPoint> previous_points;  // of the step run before
  SpeedCache cache;
};

}  // namespace shardwright::internal
