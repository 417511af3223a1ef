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
struct BodyRun : CutBody {
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
  std::uint32_t segment = 0;      // of the last op found
  std::uint32_t segment_end = 0;  // from here on there may be more; segments before are equal
  std::uint32_t next = 0;         // the next op in this segment, from its first on; kNone: none
  std::uint32_t first = 0;        // the segment's first op, among all ops ...
  const Op* ops = nullptr;        // ... and in the body
  std::size_t op_begin = 0;       // the segment's ops in EventState::queued_ops
  std::int64_t host = 0;          // the host clock before the segment's first op
  std::int64_t issue = 0;         // what the host spends on the segment
  bool has_ops = false;           // one has been found in this run
  bool is_done = false;           // the step has no ops on this stream
};

// Where a stream stands when the compute stream starts the first op of a segment.
struct StreamPosition {
  StreamHead::Status status = StreamHead::Status::kEmpty;
  std::int64_t op = 0;   // the head, counted from the first op of the segment
  double remaining = 0;  // kRunning: work left ...
  std::int64_t age = 0;  // ... this long ago; kTimed: minus the time until it can start

  bool operator==(const StreamPosition&) const = default;
};

// What else it takes to go on from such a moment. It follows from the positions and the program, or
// matters to the past only. What a blocked stream waits for is looked up anew.
struct StreamDetail {
  std::int64_t op = 0;       // the head or, when it is blocked, the op before, as in StreamPosition
  std::int64_t issued = 0;   // when `op` was, counted from the anchor's
  std::int64_t started = 0;  // kRunning: this long ago
  std::int64_t idle = 0;     // how long ago the op before ended
};

// The state of the event loop at such a moment: what the future depends on, relative to the segment
// and the moment, and the sums so far.
struct Anchor {
  std::array<StreamPosition, kStreamCount> streams;
  std::array<StreamDetail, kStreamCount> details;
  std::uint32_t run = 0;
  std::uint32_t segment = 0;
  std::int64_t time = 0;
  std::int64_t issued = 0;       // when the op that starts was issued
  std::uint32_t lowest = 0;      // the first op that has not ended, among all ops
  std::uint32_t unfinished = 0;  // of the run
  Totals totals;                 // of the run
  Totals all_totals;             // of all runs
  // Since the anchor before, if that is of the same run: bit s tells that stream s has done more
  // than wait; and the last op of those streams that has been started or is due, counted from the
  // run's first. kNone: one of them has run out of ops.
  std::uint32_t moved = 0;
  std::uint32_t highest = 0;
  // From here to the next anchor: how long before it mattered every op had been issued, at least;
  // negative when something waited for the host.
  std::int64_t slack = kNotDone;
  std::uint32_t next = kNone;  // an earlier anchor at a segment of this kind

  // Of the device behind the host.
  [[nodiscard]] std::int64_t Lead() const { return time - issued; }
};

// What happened from one anchor to a later one of the same run. It happens again wherever the state
// of the first, as far as `streams` go, meets the ops that it depends on: those from the first one
// that had not ended at its begin to `highest`, the last one that has been started or is due at its
// end.
struct Transition {
  std::uint32_t from = 0;  // indices of anchors
  std::uint32_t to = 0;
  std::uint32_t streams = 0;  // bit s: stream s does more than wait
  std::uint32_t highest = 0;  // in the body
  // The least in between, as in Anchor. Negative: needs the very same lead.
  std::int64_t slack = kNotDone;
};

// A segment of a body, and the first op of the body that had not ended when what is looked at
// began.
struct SegmentAt {
  std::size_t segment = 0;
  std::uint32_t lowest = 0;
};

// Where a transition leads to when it is taken.
struct Place {
  std::uint32_t run = 0;
  std::uint32_t segment = 0;
};

// Transitions that were taken instead of simulating what they stand for.
struct JumpNote {
  Transition transition;
  std::uint32_t count = 1;  // times in a row
  std::uint32_t run = 0;
  std::uint32_t segment = 0;
  std::int64_t time = 0;
};

// Transitions begin and end at the first anchors only: a bound for steps in which nothing recurs.
inline constexpr std::uint32_t kMostTransitionAnchors = 1024;

// What has been met in runs of one body.
struct Memo : CutBody {
  std::vector<Anchor> anchors;         // in order
  std::vector<std::uint32_t> last;     // the last anchor by kind of segment; kNone: none
  std::uint32_t run_begin = 0;         // the first anchor of this run ...
  std::uint32_t run_before_begin = 0;  // ... and of the one before
  std::vector<JumpNote> jumps;         // in order
  std::size_t filled_jumps = 0;        // those whose ops have their ends; see FillEnds

  void Clear() {
    body = nullptr;
    cuts = nullptr;
    anchors.clear();
    last.clear();
    run_begin = run_before_begin = 0;
    jumps.clear();
    filled_jumps = 0;
  }
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
  Memo memo;
  bool recurs = false;  // a step came to a state that the step before had been in
  SpeedCache cache;
};

}  // namespace shardwright::internal
