#pragma once

// The ranks of a run as processes with a GPU each: NCCL's communicators of this one.

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "executor/cuda/collective_watch.h"
#include "executor/cuda/gpu_group.h"
#include "executor/cuda/nccl.h"
#include "executor/host/communicator.h"
#include "executor/host/fault.h"
#include "executor/host/message_passing.h"

namespace shardwright {

class NcclWorld {
 public:
  // All processes construct it at once. Throws RunError when they do not come in time or NCCL
  // refuses. Keeps references. `timeout`: of collectives, but of those in which ranks connect and
  // the set-up, which have MessagePassing::timeout() of now.
  NcclWorld(const NcclTable& table, MessagePassing& processes, Gpu& gpu,
            std::chrono::milliseconds timeout, FaultBoard& faults);
  // Destroys the communicators; aborts them where the run has failed, so that no kernel of theirs
  // keeps the GPU waiting.
  ~NcclWorld();
  NcclWorld(const NcclWorld&) = delete;
  NcclWorld& operator=(const NcclWorld&) = delete;

  // One group of ranks that this one is in; `name` is for messages. Called by all processes in the
  // same order.
  [[nodiscard]] std::unique_ptr<GpuGroup> MakeGroup(const GroupRanks& ranks,
                                                    const std::string& name);
  // Device memory that all groups' collectives may use, and how they do. All processes call it at
  // once, with equal sizes, after the last group; where the library has symmetric windows it lies
  // in one of each group's, so that copy engines can do all-gathers.
  [[nodiscard]] std::byte* Allocate(Bytes size);
  [[nodiscard]] std::string paths() const;
  // Kernels of two communicators may take turns in another order on another rank, and then wait for
  // each other without end: the caller makes all collectives of a rank wait for the one before.
  [[nodiscard]] bool NeedsOneOrder() const { return !DescribeNoLaunchOrder(version_).empty(); }
  // How long to sleep before NCCL is asked again whether it is done, when that was `waited` ago.
  // Enqueuing a collective takes it microseconds, which a sleep would multiply for every one of
  // them; meeting the other ranks takes longer, and a core is of use to others meanwhile.
  [[nodiscard]] static std::chrono::microseconds PauseAfter(std::chrono::nanoseconds waited);
  // From now on collectives are watched.
  void StartWatch() { watch_->Start(); }

 private:
  class NcclGroup;
  struct Communicator {
    void* handle = nullptr;  // null: aborted
    GroupRanks ranks;
    bool is_connected = false;       // has had a collective
    std::deque<void*> windows = {};  // NCCL may fill them in later
  };

  [[nodiscard]] std::size_t Split(const GroupRanks& ranks, const std::string& name);
  // Throws what `result` of a call means; waits while it is in progress. `lock` holds mutex_ and is
  // released while it waits: for MessagePassing::timeout() of then, or in the first collective of a
  // communicator, in which the ranks connect, for that of the set-up.
  void Settle(int result, void* communicator, const char* call, std::unique_lock<std::mutex>& lock);
  [[nodiscard]] std::string ProblemOf(int result, void* communicator, const char* call) const;
  void AbortAll();
  // By NCCL's allocator, whose memory windows can show; null: some rank has none to give.
  [[nodiscard]] std::byte* AllocateForWindows(Bytes size);
  void Register(std::byte* memory, Bytes size);
  void CloseWindows(std::unique_lock<std::mutex>& lock);

  const NcclTable table_;
  MessagePassing& processes_;
  Gpu& gpu_;
  const std::chrono::milliseconds set_up_;
  FaultBoard& faults_;
  std::mutex mutex_;  // held while a communicator is used
  void* all_ = nullptr;
  std::deque<Communicator> communicators_;  // complete before the watch starts
  int version_ = 0;
  std::vector<void*> memory_;  // in windows
  std::string paths_ = "no memory yet";
  std::unique_ptr<CollectiveWatch> watch_;
};

}  // namespace shardwright
