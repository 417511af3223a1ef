#pragma once

// The event loop: one rank, by the rules of docs/execution_model.md. Between two events the set of
// running ops, and so every speed, is constant.
//
// Example: a product of 100 us and an all-gather of 60 us start at 0. Beside the gather the product
// runs at 0.9 of its speed. At 60 us the gather ends; the product has done 54 us of its work and
// goes on at full speed for the other 46 us, so it ends at 106 us.
//
// Times are picoseconds as integers, so sums are exact and runs repeat. Speeds are looked up by the
// set of running classes of ops, which is solved once (contention.cc). Cost: O(ops + edges), with
// O(streams) for each event.

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

#include "schedule/program.h"
#include "simulator/costs/contention.h"
#include "simulator/engine.h"
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
inline constexpr Speeds kFullSpeeds = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// The oldest unfinished op of a stream. Since streams are FIFO, it tells which ops have ended.
struct StreamHead {
  enum class Status : std::uint8_t { kEmpty, kUnknown, kBlocked, kTimed, kArrived, kRunning };
  Status status = Status::kEmpty;
  std::uint8_t blocker_stream = 0;
  std::uint32_t op = kNone;       // number among all ops
  std::uint32_t run = 0;          // index of its BodyRun
  std::uint32_t blocker = kNone;  // kBlocked: an op it waits for
  const Cost* cost = nullptr;
  std::int64_t time = 0;       // kTimed: when it can start; kRunning: when it will end
  std::int64_t since = 0;      // kRunning: `remaining` holds at this moment
  double remaining = 0;        // kRunning: work in picoseconds of running alone
  double speed = 0;            // kRunning; 0: not known yet
  std::int64_t end_bound = 0;  // ends no earlier, because of its launches
};

// The other members of a rank's collectives, where they are simulated, too.
class Peers {
 public:
  // The head of a stream, a collective, could start on `rank`; when its last member has come, each
  // member's Start is called.
  virtual void Arrive(std::size_t rank, std::size_t stream) = 0;

 protected:
  ~Peers() = default;
};

// Events at one moment are taken in this order: ops end, by stream; the host goes on; ops start, by
// stream. Since speeds depend on the set of running ops only, times do not depend on this order.
class EventLoop {
 public:
  // `state.costs` must be filled. `peers`: see above; null: members are like this rank.
  EventLoop(const Program& program, const PriceTable& prices, const EngineOptions& options,
            EventState& state, Peers* peers = nullptr, std::size_t rank = 0);

  // One moment: what can start does, speeds follow, and the loop goes on to the next event.
  void StartDue();
  void UpdateSpeeds();
  [[nodiscard]] std::int64_t NextEvent() const;  // kNotDone: none
  void FinishDue(std::int64_t now);

  // For peers. `now` is no later than the next event.
  void AdvanceTo(std::int64_t now) { now_ = now; }
  void Start(std::size_t stream, std::int64_t duration, std::int64_t end_bound);
  [[nodiscard]] bool SpeedsMayChange() const { return running_changed_; }
  [[nodiscard]] const Speeds& FindSpeeds();
  void SetSpeed(std::size_t stream, double speed);
  [[nodiscard]] Streams Running() const { return Streams(running_streams_); }
  [[nodiscard]] const StreamHead& HeadOf(std::size_t stream) const { return heads_[stream]; }

  [[nodiscard]] const Cost& CostOf(const BodyRun& run, std::uint32_t op) const {
    return s_.costs[run.body->ops[op - run.base].shape.value];
  }
  [[nodiscard]] const OpRecord& RecordOf(std::uint32_t op) const { return s_.records[op]; }
  [[nodiscard]] std::int64_t finished() const { return finished_; }
  // Spans of init and of the steps that are wanted.
  template <class IsWanted>
  void AppendSpans(std::vector<Span>& spans, const IsWanted& is_wanted) const;

 private:
  // event_issue.cc: how ops reach the streams' queues.
  bool BeginNextBody();
  [[nodiscard]] bool IsAhead() const;
  void IssueAhead();
  void IssueOne(BodyRun& run);
  bool TakeStall(BodyRun& run);
  bool WaitForDevice(BodyRun& run);
  bool IssueHostOp(BodyRun& run, std::uint32_t op, const Cost& cost);
  void Append(std::uint32_t op, const Cost& cost);

  void SetHead(std::size_t stream, std::uint32_t op);
  bool FindBlocker(StreamHead& head) const;
  void Resolve(std::size_t stream);
  void Ready(std::size_t stream);
  void Finish(std::size_t stream);
  void ChargeGap(const StreamHead& head);
  [[nodiscard]] std::uint8_t BindingStream(const BodyRun& run, std::uint32_t op) const;
  [[nodiscard]] Span SpanOf(const BodyRun& run, std::uint32_t op, std::int64_t stream_free) const;

  // The op number an edge of a run's op stands for, kNone when nothing set the slot.
  [[nodiscard]] std::uint32_t Target(const BodyRun& run, Edge edge) const {
    return edge.is_carried() ? s_.slots[run.slot_begin + edge.slot()] : run.base + edge.value;
  }
  [[nodiscard]] std::uint32_t RunOf(std::uint32_t op) const;
  [[nodiscard]] std::uint8_t StreamOf(const BodyRun& run, std::uint32_t target) const {
    return CostOf(target >= run.base ? run : s_.runs[RunOf(target)], target).stream;
  }
  [[nodiscard]] bool HasEnded(std::uint32_t op, std::size_t stream) const {
    return heads_[stream].op > op;
  }

  const Program& program_;
  const ContentionModel& contention_;
  const EngineOptions& options_;
  EventState& s_;
  Peers* const peers_;
  const std::size_t rank_;

  std::array<StreamHead, kStreamCount> heads_{};
  std::array<std::uint32_t, kStreamCount> last_on_stream_{};  // of those issued
  std::array<std::int64_t, kStreamCount> stream_free_{};      // when the last op ended that has
  std::int64_t now_ = 0;
  std::int64_t host_ = 0;
  std::uint32_t host_blocker_ = kNone;  // the host waits for this op ...
  std::size_t host_blocker_stream_ = 0;
  std::uint32_t used_streams_ = 0;     // bit s: the step has ops on stream s
  std::uint32_t running_streams_ = 0;  // bit s: the head of stream s runs
  std::uint32_t waiting_streams_ = 0;  // bit s: it has not started yet
  RunningKey running_key_ = 0;
  RunningKey speeds_key_ = 0;  // the key that speeds_ belongs to
  const Speeds* speeds_ = &kFullSpeeds;
  bool running_changed_ = false;
  std::int64_t finished_ = 0;   // device ops that have ended
  std::uint32_t op_count_ = 0;  // ops of all runs so far
};

template <class IsWanted>
void EventLoop::AppendSpans(std::vector<Span>& spans, const IsWanted& is_wanted) const {
  std::array<std::int64_t, kStreamCount> stream_free{};
  for (const BodyRun& run : s_.runs) {
    for (std::uint32_t op = run.base; op < run.base + run.body->size(); ++op) {
      std::int64_t& free = stream_free[CostOf(run, op).stream];
      if (is_wanted(run)) {
        spans.push_back(SpanOf(run, op, free));
      }
      free = s_.records[op].end;
    }
  }
}

}  // namespace shardwright::internal
