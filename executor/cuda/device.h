#pragma once

// The CUDA device of one rank: streams, events, launches. It names no CUDA type; what lies below is
// a Gpu.
//
// A CudaWorld is made once per process, a CudaDevice once per rank. With --loopback 4 these are one
// world and 4 devices on 4 threads. device.cc has an example of streams and tickets,
// device_calls.cc the launches of each call, device_graphs.cc the graphs.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "executor/cuda/activity_log.h"
#include "executor/cuda/gpu.h"
#include "executor/cuda/gpu_group.h"
#include "executor/cuda/nccl_world.h"
#include "executor/cuda/op_ring.h"
#include "executor/cuda/ops/model_ops.h"
#include "executor/device.h"
#include "executor/evaluation.h"
#include "executor/host/clock.h"
#include "executor/host/communicator.h"
#include "executor/host/execute.h"
#include "executor/host/fault.h"

namespace shardwright {

struct CudaOptions {
  // How long a rank waits for work of its own or for the others before it gives the run up. Ranks
  // in processes have MessagePassing::timeout() of when the session begins for what comes before
  // the first step, and for the first collective of each group.
  std::chrono::milliseconds timeout{60000};
  // The processes that the ranks are in, one each with a GPU of its own, and the NCCL between them;
  // null: the ranks are threads of this process on one GPU (loopback).
  MessagePassing* processes = nullptr;
  const NcclTable* nccl = nullptr;
  // Times the work of a traced run; null: events do.
  ActivityLog* activities = nullptr;
  // Counts behind every loss (evaluation); null: nobody asks.
  EvaluationCounter* counter = nullptr;
  Bytes memory_limit{0};  // of one rank's device arena; 0: what is free
  // Launch what FindStretches finds as graphs, after a step op by op; not in traced steps, whose
  // ops are timed one by one.
  bool graphs = false;
};

// State that the ranks of one process share.
class CudaWorld {
 public:
  // Keeps references. Throws EnvironmentError for groups larger than loopback can sum, RunError
  // when NCCL refuses. Ranks in processes: all of them construct it at once.
  CudaWorld(const ExecuteContext& context, const CudaOptions& options, Gpu& gpu);

  ~CudaWorld();
  CudaWorld(const CudaWorld&) = delete;
  CudaWorld& operator=(const CudaWorld&) = delete;

  [[nodiscard]] GpuGroup& GroupOf(GroupId group, Rank rank);
  // Of the host threads, for updates in host memory.
  [[nodiscard]] Communicator& HostGroupOf(GroupId group, Rank rank);
  [[nodiscard]] std::int64_t MemberOf(GroupId group, Rank rank) const;
  // Device memory for all that collectives touch. Ranks in processes: all of them call it at once,
  // with equal sizes.
  [[nodiscard]] std::byte* NewArena(Bytes size);
  // Collectives with the same answer take turns, whatever their streams: those of one group, or all
  // where the library keeps no order across groups.
  [[nodiscard]] GroupId TurnsOf(GroupId group) const {
    return nccl_ && nccl_->NeedsOneOrder() ? GroupId(0) : group;
  }
  // The ops that every rank of this process has under way, a line each. Any thread.
  [[nodiscard]] std::string DescribeRanks() const;
  [[nodiscard]] OpRing& RingOf(Rank rank) { return rings_.at(rank); }
  // How NCCL gathers; empty: loopback.
  [[nodiscard]] std::string paths() const { return nccl_ ? nccl_->paths() : std::string(); }

  const ExecuteContext& context;
  const CudaOptions options;
  Gpu& gpu;
  // How long a rank waits for work of its own: with processes longer than any collective may take.
  const std::chrono::milliseconds patience;
  const RunClock clock;
  FaultBoard faults;
  // A timed event and when it was over, by which times on the GPU become times of the clock: first
  // the same for all ranks of the process, so that theirs compare among each other.
  GpuEvent anchor;
  SimTime anchor_time;
  // Of all ranks of this process: graphs that were made, ops in them, graphs that were refused.
  struct GraphCounts {
    std::atomic<std::int64_t> graphs = 0, ops = 0, refused = 0;
  };
  GraphCounts graph_counts;

 private:
  using Key = std::pair<GroupId, std::int64_t>;  // kind of group, first rank
  [[nodiscard]] Key KeyOf(GroupId group, Rank rank) const;

  std::map<Rank, OpRing> rings_;                     // complete after construction
  std::unique_ptr<NcclWorld> nccl_;                  // null: loopback
  std::map<Key, std::unique_ptr<GpuGroup>> groups_;  // complete after construction
  std::map<Key, std::unique_ptr<Communicator>> host_groups_;
};

class CudaDevice : public Device {
 public:
  CudaDevice(CudaWorld& world, Rank rank);
  ~CudaDevice() override;

  [[nodiscard]] std::byte* Allocate(Bytes size, bool on_host) override;
  void Copy(void* to, const void* from, std::int64_t bytes) override;
  void Prepare(const Body& step, std::span<const Work> works) override;
  Ticket Submit(const Work& work) override;
  void Wait(Ticket ticket) override;
  void RunOnHost(const Work& work) override;
  void Finish() override;
  void Fail(const std::string& cause) override { world_.faults.Report(cause); }
  void Stop() override;
  // No earlier than what this rank has seen to be over: the GPU's times are later than the clock's
  // by what setting the anchor took.
  [[nodiscard]] SimTime Now() const override { return std::max(world_.clock.Now(), seen_); }

 private:
  // Pinned memory for what the host reads back. The GPU writes it, so the host looks only behind an
  // event.
  struct Readback {
    gpu::Fault fault;
    float number = 0.0F;
    gpu::LabelCounts labels;
  };
  // Work that is not known to be over.
  struct Pending {
    std::uint64_t sequence = 0;
    GpuEvent event;
    bool owns_event = true;  // false: it is that of later work, too
    const std::string* name = nullptr;
    // Timed; null without a span, or where activities are recorded. `end` also where `end_to` is.
    GpuEvent start, end;
    Span* span = nullptr;
    SimTime* end_to = nullptr;
    Readback* readback = nullptr;  // its loss goes to *loss_to
    float* loss_to = nullptr;
    // Evaluation: the loss, whose `call` may by then be that of a later step but for what `key`
    // tells.
    const ModelOpCall* loss = nullptr;
    DropoutKey key;
  };
  struct Queue {
    GpuStream stream;
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
    std::deque<Pending> pending;
  };

  // Ops of the compute stream that may be launched as one graph.
  struct Stretch {
    std::vector<Work> works;
    enum class State : std::uint8_t { kNew, kRan, kCaptured, kRefused } state = State::kNew;
    GpuGraph graph;
    std::uint64_t first = 0;  // ticket of its first op, where the graph is under way; else 0
  };

  // Throws RunError when less is free, or allowed.
  void CheckFree(Bytes size, Bytes limit = Bytes(0));
  // Device memory of this rank alone, zeros.
  [[nodiscard]] std::byte* NewMemory(Bytes size);
  std::byte* ZeroFill(std::byte* data, Bytes size);
  [[nodiscard]] Queue& QueueOf(Stream stream);
  [[nodiscard]] GpuEvent TakeEvent(bool timed);
  [[nodiscard]] Readback* TakeReadback();
  // Moves what is over out of the queue; what it left behind is read.
  void Collect(Queue& queue);
  void NoteOpen(const Queue& queue);
  void Complete(const Pending& pending);
  // Polls until the event is over; throws what went wrong meanwhile.
  void Await(GpuEvent event, const std::string& what);
  void AwaitQueue(Queue& queue, std::uint64_t sequence);
  void CheckFault();
  // Work that is not known to be over.
  [[nodiscard]] static const Pending& PendingOf(const Queue& queue, std::uint64_t sequence);
  // Work submitted to the queue from now on starts behind the ticket's work.
  void Follow(Queue& queue, const Ticket& ticket);
  [[nodiscard]] SimTime TimeOf(GpuEvent event);
  // Takes an event that was over at `time`; from now on times may count from it.
  void MoveAnchor(GpuEvent event, SimTime time);

  // Launches the graph of the stretch that the work begins, or finds the ticket of a work that is
  // inside one; nothing where the work is to be submitted by itself.
  [[nodiscard]] std::optional<Ticket> SubmitInStretch(const Work& work);
  [[nodiscard]] bool Capture(Stretch& stretch, Queue& queue, StepContext& step);
  void LaunchStretch(Stretch& stretch, Queue& queue, const Work& first);
  void FillPoison(const Work& work, GpuStream stream);
  void SubmitCall(const Work& work, Queue& queue, Pending& pending);
  void SubmitCopy(const CopyCall& call, GpuStream stream);
  void SubmitCollective(const CollectiveCall& call, const Work& work, GpuStream stream,
                        const Pending& pending);
  void SubmitModel(ModelCall& call, const Work& work, GpuStream stream, Pending& pending);
  void CountLabels(const ModelOpCall& call, Pending& pending, GpuStream stream);
  void SubmitInitialize(const InitializeCall& call, GpuStream stream);
  void SubmitNorm(const NormCall& call, const StepContext& step, GpuStream stream);
  void DecideStep(const ClipCall& call, const StepContext& step, GpuStream stream);
  void SubmitClip(const ClipCall& call, StepContext& step, GpuStream stream);
  void SubmitUpdate(UpdateCall& call, const StepContext& step, GpuStream stream);
  void DivideAll(std::span<const ElementRange> ranges, double divisor, GpuStream stream);
  void ClipOnHost(UpdateCall& update, const Work& work);

  CudaWorld& world_;
  Gpu& gpu_;
  const Rank rank_;
  OpRing& ring_;
  // The norm of gradients in host memory on its way through all ranks, which read it here.
  CollectiveCall norm_sum_;
  float norm_ = 0.0F;
  std::array<Queue, kStreamCount> queues_;
  std::vector<GpuEvent> free_events_, free_timed_;
  std::vector<Readback*> free_readbacks_;
  struct GroupState {
    GpuEvent ready, summed, done;  // of the collective that is submitted
    Ticket last;                   // of those that take turns with this group's
  };
  std::map<GroupId, GroupState> group_states_;
  // Moves with the work: CUDA gives differences of times in 24 bits.
  GpuEvent anchor_;
  SimTime anchor_time_;
  SimTime seen_;                 // the latest end that is known
  gpu::Fault* fault_ = nullptr;  // on the GPU
  gpu::Fault found_;             // the last one that was read back
  double* squares_ = nullptr;    // partial sums of a norm
  std::int64_t squares_count_ = 0;
  std::vector<Stretch> stretches_;
  // By call: its stretch and its place in there.
  std::unordered_map<const Call*, std::pair<std::size_t, std::size_t>> in_stretch_;
  gpu::LabelCounts* label_counts_ = nullptr;  // evaluation: the counts, then a byte per row
  std::int64_t label_rows_ = 0;
};

}  // namespace shardwright
