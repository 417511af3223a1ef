#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "executor/internal/loss_book.h"
#include "executor/internal/memory_log.h"
#include "executor/runtime.h"

namespace shardwright {

// The host side of one rank. Used by one thread at a time.
class Runtime::RankRunner {
 public:
  RankRunner(const ExecutorInput& input, const RunOptions& options, Rank rank,
             std::unique_ptr<Device> device, LossBook& losses);
  // The device goes first: its streams may still use calls, contexts and spans.
  ~RankRunner() { device_.reset(); }
  RankRunner(const RankRunner&) = delete;
  RankRunner& operator=(const RankRunner&) = delete;

  void RunInit();
  void RunSteps(std::int64_t first, std::int64_t count);
  // The next step runs the warm-up body, if the program has one.
  void ExpectFirstStep() { ran_warmup_ = false; }
  // Tells all ranks that this one cannot go on.
  void Fail(const std::string& cause) { device_->Fail(cause); }

  void Stop() { device_->Stop(); }

  void CopyMemory(void* to, const void* from, std::int64_t bytes) const {
    device_->Copy(to, from, bytes);
  }
  [[nodiscard]] const Binding& binding() const { return binding_; }
  [[nodiscard]] ScalingState& scaling() { return scaling_; }
  // Appends what was recorded and forgets it.
  void MoveTraceTo(Trace& trace);

 private:
  // A step that was issued and is not known to be over.
  struct OpenStep {
    std::unique_ptr<StepContext> context;
    std::array<Ticket, kStreamCount> last;   // by stream: the last work so far
    std::array<SimTime, kStreamCount> ends;  // by stream: when the step's last op was over
  };

  // The part of a work that every step has in common.
  [[nodiscard]] Work WorkOf(BodyKind kind, std::uint32_t op);
  void PrepareStep();
  [[nodiscard]] StepContext& OpenContext();
  void RunBody(BodyKind kind, StepContext& context);
  void RunOp(const Body& body, std::uint32_t op, StepContext& context);
  void LoadInputs(const Op& op, const StepContext& context);
  [[nodiscard]] Span* NewSpans(std::size_t count);
  void SetCarries(const Body& body);
  void FindWaits(const Body& body, OpId op);
  [[nodiscard]] Stream StreamOf(const Op& op) const;
  // Waits for the oldest open step and reports it, with the time at which the device was through,
  // however much later that is noticed.
  void CloseStep();
  [[nodiscard]] const std::vector<std::string>& NamesOf(BodyKind kind) const {
    return names_[static_cast<std::size_t>(kind)];
  }

  const ExecutorInput& input_;
  const RunOptions& options_;
  const Rank rank_;
  std::unique_ptr<Device> device_;
  LossBook& losses_;
  Binding binding_;
  std::array<std::vector<std::string>, 3> names_;  // by body kind, then op
  // By body kind, then stream: the last op that goes there, those on the host included.
  std::array<std::array<OpId, kStreamCount>, 3> last_ops_;

  // Of the body at hand.
  BodyKind kind_ = BodyKind::kInit;
  Span* spans_of_body_ = nullptr;
  std::vector<Ticket> tickets_;  // by op
  std::vector<Ticket> waits_;    // of the op at hand

  std::array<Ticket, kStreamCount> last_;  // by stream
  std::vector<Ticket> slots_;              // carry slots
  Ticket inputs_read_;                     // the last copy out of the host's input buffer
  bool ran_warmup_ = false;
  ScalingState scaling_;
  std::deque<OpenStep> open_;
  std::deque<std::vector<Span>> spans_;  // one vector per body run; they never move
  std::vector<MemorySample> samples_;
  MemoryLog memory_;
};

}  // namespace shardwright
