#pragma once

// The event loop of the engine with contention; see engine.h. Between two events the set of running
// ops, and so every speed, is constant.

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "schedule/program.h"
#include "schedule/repetition.h"
#include "simulator/costs/contention.h"
#include "simulator/engine.h"
#include "simulator/internal/engine_events.h"
#include "simulator/internal/engine_state.h"
#include "traces/trace.h"

namespace shardwright::internal {

// The streams in a set (bit s: stream s), ascending; for range-for.
class Streams {
 public:
  explicit Streams(std::uint32_t set) : set_(set) {}

  struct Iterator {
    std::uint32_t left = 0;
    std::size_t operator*() const { return static_cast<std::size_t>(std::countr_zero(left)); }
    Iterator& operator++() {
      left &= left - 1;
      return *this;
    }
    bool operator==(const Iterator&) const = default;
  };
  [[nodiscard]] Iterator begin() const { return {set_}; }
  [[nodiscard]] static Iterator end() { return {}; }

 private:
  std::uint32_t set_;
};

// Of ops without load.
inline constexpr Speeds kFullSpeeds = {1, 1, 1, 1, 1, 1, 1, 1};

class EventLoop {
 public:
  EventLoop(const Program& program, const Repetitions& cuts, const PriceTable& prices,
            const EngineOptions& options, const std::vector<Cost>& costs, EventState& state)
      : program_(program),
        cuts_(cuts),
        contention_(prices.contention),
        options_(options),
        costs_(costs),
        s_(state) {}

  EngineResult Run();
  void AppendSpans(const BodyRun& run, std::vector<Span>& spans) const;

 private:
  void Reset();
  void SetHead(std::size_t stream, std::uint32_t op, std::uint32_t run, const Cost* cost);
  void SetRunning(std::size_t stream) {
    s_.heads[stream].status = StreamHead::Status::kRunning;
    running_streams_ |= 1u << stream;
    waiting_streams_ &= ~(1u << stream);
    timed_streams_ &= ~(1u << stream);
  }
  void SetTimed(std::size_t stream, std::int64_t time) {
    s_.heads[stream].status = StreamHead::Status::kTimed;
    s_.heads[stream].time = time;
    timed_streams_ |= 1u << stream;
  }

  // event_issue.cc. A host that can be blocked is simulated op by op and fills the streams' queues.
  // A host that never waits needs no simulation: each stream looks up its next op and what the host
  // spends until then.
  bool BeginNextBody();
  void IssueAhead();
  void IssueOne(BodyRun& run);
  bool TakeStall(BodyRun& run);
  bool WaitForDevice(BodyRun& run);
  bool IssueHostOp(BodyRun& run, std::uint32_t op, const Cost& cost);
  void Append(std::uint32_t op, const Cost& cost);
  void PullFirstOps();
  void PullHead(std::size_t stream);
  [[nodiscard]] const SegmentQueues& QueuesOf(const BodyRun& run, std::size_t segment) {
    const std::size_t kind = run.cuts->KindOf(segment);
    const std::vector<SegmentQueues>& known = s_.queues[static_cast<std::size_t>(run.kind)];
    return kind < known.size() && known[kind].is_known ? known[kind] : FindQueues(run, segment);
  }
  const SegmentQueues& FindQueues(const BodyRun& run, std::size_t segment);
  [[nodiscard]] std::uint32_t LastInGroup(const StreamCursor& end, std::uint32_t group);
  void EnterSegment(StreamCursor& cursor, std::size_t stream);
  bool EnterNextSegment(StreamCursor& cursor, std::size_t stream);
  bool EnterNextRun(StreamCursor& cursor, std::size_t stream);
  void PlaceCursor(std::size_t stream, std::uint32_t op, const Place& place);

  // event_anchors.cc: states at the begins of segments.
  void NoteComputeStart();
  // True when the simulation can stop, because this step goes on like the one before.
  bool TakeAnchors(EngineResult& result);
  void BeginAnchorsOfRun();
  void AddAnchor();
  void AddStream(std::size_t stream, const Anchor* before, Anchor& anchor) const;
  [[nodiscard]] bool MeetsStepBefore(const Anchor& now, EngineResult& result) const;

  // event_memo.cc, event_match.cc: jumps over what has been met before.
  bool Jump();
  bool Take(const Transition& transition, const Anchor& now, std::uint32_t count);
  [[nodiscard]] Transition FindTransition(std::uint32_t from, std::uint32_t last,
                                          const Anchor& now) const;
  [[nodiscard]] SegmentAt AtAnchor(const Anchor& anchor) const {
    return {anchor.segment, anchor.lowest - s_.runs[anchor.run].base};
  }
  [[nodiscard]] std::uint32_t CountLoops(const Transition& transition, const Anchor& now) const;
  bool MoveHeads(const Transition& transition, const Place& to, std::int64_t issued);
  void Apply(const Transition& transition, std::uint32_t count, const Place& to);
  void SetStream(std::size_t stream, const Anchor& end, const Place& to);
  void FillEnds();
  void FillEnds(const JumpNote& jump);

  // event_speeds.cc
  void FindSpeeds();
  void UpdateSpeeds();

  bool FindBlocker(std::size_t stream);
  void Resolve(std::size_t stream);
  void Start(std::size_t stream);
  void Finish(std::size_t stream);
  void StartDue();
  void FinishDue();
  [[nodiscard]] std::int64_t NextEvent() const;
  [[nodiscard]] bool StepsAreSteady(const BodyRun& a, const BodyRun& b, std::int64_t period) const;
  // Adds the results of step runs that are complete; true when the simulation can stop.
  bool Collect(EngineResult& result);
  // Whether there can be something to collect.
  [[nodiscard]] bool HasCompleteRun() const {
    return collected_ < s_.runs.size() && s_.runs[collected_].unfinished == 0;
  }

  // The op number an edge of a run's op stands for, kNone when nothing set the slot.
  [[nodiscard]] std::uint32_t Target(const BodyRun& run, Edge edge) const {
    return edge.is_carried() ? s_.slots[run.slot_begin + edge.slot()] : run.base + edge.value;
  }
  [[nodiscard]] const Cost& CostOf(const BodyRun& run, std::uint32_t op) const {
    return costs_[run.body->ops[op - run.base].shape.value];
  }
  [[nodiscard]] std::uint32_t RunOf(std::uint32_t op) const;
  [[nodiscard]] bool HasEnded(std::uint32_t op) const {
    return s_.heads[CostOf(s_.runs[RunOf(op)], op).stream].op > op;
  }
  // The run of an edge's target.
  [[nodiscard]] const BodyRun& RunOf(const BodyRun& run, std::uint32_t target) const {
    return target >= run.base ? run : s_.runs[RunOf(target)];
  }
  [[nodiscard]] std::uint8_t BindingStream(const BodyRun& run, std::uint32_t op,
                                           std::int64_t time) const;

  const Program& program_;
  const Repetitions& cuts_;
  const ContentionModel& contention_;
  const EngineOptions& options_;
  const std::vector<Cost>& costs_;
  EventState& s_;

  std::int64_t now_ = 0;
  std::int64_t host_ = 0;
  std::uint32_t host_blocker_ = kNone;  // the host waits for this op
  std::uint32_t used_streams_ = 0;      // bit s: stream s has ops
  std::uint32_t running_streams_ = 0;   // bit s: the head of stream s runs
  std::uint32_t waiting_streams_ = 0;   // bit s: it has not started yet ...
  std::uint32_t timed_streams_ = 0;     // ... and it is known when it will
  std::uint64_t running_key_ = 0;       // class of the running op on stream s in byte s
  std::uint64_t speeds_key_ = 0;        // the key that speeds_ belongs to
  const Speeds* speeds_ = &kFullSpeeds;
  bool running_changed_ = false;
  std::size_t collected_ = 0;  // runs whose results are in
  std::int64_t front_ = 0;     // when all collected runs were complete
  std::int64_t late_time_ = 0;
  std::int64_t finished_ = 0;   // device ops that have ended
  std::uint32_t op_count_ = 0;  // ops of all runs so far
  // Since the last anchor: how long before it mattered every op had been issued, at least, negative
  // when something waited for the host; and which streams have got a new head.
  std::int64_t issue_slack_ = kNotDone;
  std::uint32_t moved_ = 0;
  bool host_waits_ = false;           // the host can be blocked or delayed, so it is simulated
  std::uint32_t anchor_run_ = kNone;  // the run and the segment of the last anchor
  std::uint32_t anchor_segment_ = kNone;
  bool steps_are_used_up_ = false;  // a stream ran out of ops because no more steps are simulated
  bool anchor_is_due_ = false;      // the compute stream has started the first op of a segment
};

}  // namespace shardwright::internal
