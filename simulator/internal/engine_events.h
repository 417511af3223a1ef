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

// The oldest unfinished op of a stream. Since streams are FIFO, it tells which ops have ended.
struct StreamHead {
  enum class Status : std::uint8_t { kEmpty, kUnknown, kBlocked, kTimed, kRunning };
  Status status = Status::kEmpty;
  std::uint8_t blocker_stream = 0;
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

// An op as its stream and its communicator see it. Ops are counted from the first of the segment.
struct QueuedOp {
  std::int64_t host = 0;                  // what the host spends on the segment's ops before it
  std::uint32_t next_on_stream = kNone;   // in the segment, as the next one
  std::uint32_t before_in_group = kNone;  // the collective before it on its communicator
};

// The queues of the ops of a segment. Equal for all segments of a kind.
struct SegmentQueues {
  bool is_known = false;     // looked up already
  std::size_t op_begin = 0;  // its ops in EventState::queued_ops
  std::int64_t issue = 0;    // what the host spends on all of them
  std::array<std::uint32_t, kStreamCount> first_on_stream{};
  std::array<std::uint32_t, kMaxGroups> last_in_group{};
};

// Where a stream looks for its next op, when the host never waits.
struct StreamCursor {
  std::uint32_t run = 0;
  std::uint32_t segment = 0;  // of the last op found
  std::uint32_t next = 0;     // the next op in this segment, from its first on; kNone: none
  std::int64_t host = 0;      // the host clock before the segment's first op
  bool has_ops = false;       // one has been found in this run
  bool is_done = false;       // the step has no ops on this stream
};

// Where a stream stands when the compute stream starts the first op of a segment.
struct StreamPosition {
  StreamHead::Status status = StreamHead::Status::kEmpty;
  std::int64_t op = 0;   // the head, counted from the first op of the segment
  double remaining = 0;  // kRunning: work left ...
  std::int64_t age = 0;  // ... this long ago; kTimed: minus the time until it can start

  bool operator==(const StreamPosition&) const = default;
};

// The state of the event loop at such a moment: what the future depends on, relative to the segment
// and the moment, and the sums so far.
struct Anchor {
  std::array<StreamPosition, kStreamCount> streams;
  std::uint32_t run = 0;
  std::uint32_t segment = 0;
  std::int64_t time = 0;
  std::int64_t issued = 0;       // when the op that starts was issued
  std::uint32_t lowest = 0;      // the first op that has not ended, among all ops
  std::uint32_t unfinished = 0;  // of the run
  Totals totals;                 // of the run
  Totals all_totals;             // of all runs
  // From here to the next anchor: how long before it mattered every op had been issued, at least;
  // negative when something waited for the host.
  std::int64_t slack = kNotDone;

  // Of the device behind the host.
  [[nodiscard]] std::int64_t Lead() const { return time - issued; }
};

// What else it takes to go on from an anchor. It follows from the positions and the program, or
// matters to the past only. What a blocked stream waits for is looked up anew.
struct StreamDetail {
  std::int64_t op = 0;       // the head or, when it is blocked, the op before, as in StreamPosition
  std::int64_t issued = 0;   // when `op` was, counted from the anchor's
  std::int64_t started = 0;  // kRunning: this long ago
  std::int64_t idle = 0;     // how long ago the op before ended
};

// A transition from one anchor to another one of the same run, and what it took for granted.
struct Transition {
  std::uint32_t next = kNone;  // the next one that begins at a segment of this kind
  std::uint32_t run = 0;       // where it began when it was met: run, ...
  std::uint32_t segment = 0;   // ... segment ...
  std::int64_t met = 0;        // ... and moment
  std::uint32_t advance = 0;   // segments to its end
  // What happens depends on the ops from `lowest`, the first one that had not ended (in the body),
  // to `highest`, the last one that has been started or is due (from the segment's first). They lie
  // in segments from `before` ahead of the segment to `after` behind it, ...
  std::uint32_t lowest = 0;
  std::uint32_t highest = 0;
  std::uint32_t before = 0;
  std::uint32_t after = 0;
  std::uint32_t reach = 0;  // ... and up to here behind it lie the ops that streams were blocked at
  // ... and on these streams (bit s). The others wait all the time.
  std::uint32_t streams = 0;
  std::array<StreamPosition, kStreamCount> begin;
  std::array<StreamPosition, kStreamCount> end;
  std::array<StreamDetail, kStreamCount> details;  // of the end
  bool is_loop = false;                            // `end` equals `begin`
  std::int64_t lead = 0;                           // at its begin
  std::int64_t slack = 0;      // least in between, as in Anchor; negative: needs the very same lead
  std::int64_t time = 0;       // from begin to end ...
  std::int64_t host = 0;       // ... and between the issues of the two ops
  std::uint32_t finished = 0;  // ops that ended
  Totals totals;               // what was added to the run's
};

// The begin of a transition that is being watched.
struct Watch {
  bool is_on = false;
  Anchor begin;
  std::uint32_t moved = 0;  // bit s: stream s has got a new head since
  std::int64_t slack = kNotDone;
};

// A transition that was taken instead of simulating what it stands for.
struct JumpNote {
  std::uint32_t transition = 0;
  std::uint32_t count = 1;  // times in a row
  std::uint32_t run = 0;
  std::uint32_t segment = 0;
  std::int64_t time = 0;
};

// What is known of transitions. There are two levels: from segment to segment, and from micro-batch
// to micro-batch.
inline constexpr std::size_t kLevels = 2;
struct Memo {
  const Body* body = nullptr;  // whose segments it is about
  std::array<std::vector<std::uint32_t>, kLevels>
      first;  // by kind of segment; kNone behind its end
  std::vector<Transition> transitions;
  std::vector<JumpNote> jumps;   // in order
  std::size_t filled_jumps = 0;  // those whose ops have their ends; see FillEnds
  std::array<Watch, kLevels> watches;
};

struct EventState {
  std::vector<std::int64_t> end;  // of ops that have ended; see also FillEnds
  std::vector<EventRecord> records;
  std::vector<BodyRun> runs;
  std::vector<std::uint32_t> slots;  // op numbers, kNone = nothing set the slot
  std::array<StreamHead, kStreamCount> heads;
  std::array<std::uint32_t, kStreamCount> last_on_stream{};
  std::array<std::int64_t, kStreamCount> stream_free{};   // when the last op ended that has
  std::array<std::uint32_t, kStreamCount> first_ended{};  // the first op that ended at that moment
  std::array<std::uint32_t, kStreamCount> last_ended{};   // the last one
  std::array<std::uint32_t, kMaxGroups> last_in_group{};
  std::array<StreamCursor, kStreamCount> cursors;
  std::array<std::vector<SegmentQueues>, 3> queues;  // by BodyKind, then by kind of segment
  std::vector<QueuedOp> queued_ops;
  std::vector<Anchor> anchors;           // of the run that the compute stream is in
  std::vector<Anchor> previous_anchors;  // of the run before
  Memo memo;
  bool recurs = false;  // a step came to a state that the step before had been in
  SpeedCache cache;
};

}  // namespace shardwright::internal
