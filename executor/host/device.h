#pragma once

// The host device: a rank is a thread, each of its streams is another one, memory is malloc'ed.

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "executor/device.h"
#include "executor/host/clock.h"
#include "executor/host/communicator.h"
#include "executor/host/execute.h"
#include "executor/host/fault.h"
#include "executor/host/message_passing.h"

namespace shardwright {

struct HostOptions {
  // How long a rank waits for the others in a collective before it gives the run up; for an op of
  // its own, twice as long.
  std::chrono::milliseconds timeout{60000};
  // The same until the first step: for ranks to meet, to connect, and to read their weights.
  // PyTorch's default for NCCL is as long.
  std::chrono::milliseconds set_up_timeout{600000};
  // That share a rank's compute, its own included.
  std::int64_t threads = 1;
  // Bytes of device memory of one rank; 0: no limit.
  Bytes memory_limit{0};
  // Adversarial scheduling: before this percentage of all works, the stream idles for a random time
  // up to `max_delay`. Any outcome is legal, so a missing edge shows.
  int delay_percent = 0;
  std::chrono::microseconds max_delay{500};
  std::uint64_t delay_seed = 1;
  // The processes that the ranks are in, one each; null: the ranks are threads of this process.
  MessagePassing* processes = nullptr;
};

// What the ranks of this process share.
class HostWorld {
 public:
  // Keeps references to the contexts, by stage of the pipeline, and what they refer to. Ranks in
  // processes: all of them construct it at once.
  HostWorld(std::span<const ExecuteContext> contexts, const HostOptions& options);

  ~HostWorld();
  HostWorld(const HostWorld&) = delete;
  HostWorld& operator=(const HostWorld&) = delete;

  // The communicator of `rank`'s group of this kind, and which member the rank is. Groups of host
  // threads are apart from those of streams.
  struct Membership {
    Communicator& communicator;
    std::int64_t member = 0;
  };
  [[nodiscard]] Membership MembershipOf(GroupId group, Rank rank, bool of_host_threads);
  [[nodiscard]] const ExecuteContext& ContextOf(Rank rank) const;

  const HostOptions options;
  const RunClock clock;
  FaultBoard faults;

 private:
  struct Key {
    std::string name;  // of a group; empty: of two neighbours in the pipeline
    std::int64_t first = 0, stride = 1;
    bool of_host_threads = false;
    auto operator<=>(const Key&) const = default;
  };
  void Join(const std::string& name, const GroupRanks& ranks);

  const std::span<const ExecuteContext> contexts_;
  std::map<Key, std::unique_ptr<Communicator>> communicators_;  // complete after construction
};

class HostDevice : public Device {
 public:
  HostDevice(HostWorld& world, Rank rank);
  HostDevice(const HostDevice&) = delete;
  HostDevice& operator=(const HostDevice&) = delete;
  ~HostDevice() override;

  [[nodiscard]] std::byte* Allocate(Bytes size, bool on_host) override;
  Ticket Submit(const Work& work) override;
  void Wait(Ticket ticket) override;
  void RunOnHost(const Work& work) override;
  void Finish() override;
  void Fail(const std::string& cause) override { world_.faults.Report(cause); }
  void Stop() override;
  [[nodiscard]] SimTime Now() const override { return world_.clock.Now(); }

 private:
  struct Item {
    Work work;
    std::vector<Ticket> waits;
    std::uint64_t turn = 0;  // collectives: how many of its group were submitted before
  };
  struct Queue {
    std::deque<Item> items;
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
    bool is_running = false;  // the first item
    std::thread worker;
    std::mt19937_64 random;  // used by the worker alone
  };
  struct Turns {
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
  };

  void ServeStream(Stream stream);
  // Runs the first item of the queue. Called and returns with the lock held.
  void RunFront(Queue& queue, std::unique_lock<std::mutex>& lock);
  void RunItem(const Item& item, SimTime arrival, Span& span);
  // Divides and clips the gradients of an update on the host, together with the other ranks.
  void ClipOnHost(UpdateCall& update, const Item& item);
  [[nodiscard]] bool IsOver(const Ticket& ticket) const;
  // Sleeps until the predicate holds; throws if the run has failed by then.
  template <class Predicate>
  void Await(std::unique_lock<std::mutex>& lock, Predicate predicate);
  // The same for the host thread, which ends the run when no op ends for too long.
  template <class Predicate>
  void AwaitStreams(std::unique_lock<std::mutex>& lock, Predicate predicate);
  // The op that holds the streams up: one that runs and waits for no other rank, if there is one.
  [[nodiscard]] std::string StuckOp() const;

  HostWorld& world_;
  const Rank rank_;
  const ExecuteContext& context_;
  Team team_;
  // The norm of gradients in host memory on its way through all ranks, which read it here.
  CollectiveCall norm_sum_;
  float norm_ = 0.0F;
  std::vector<std::unique_ptr<std::byte[], void (*)(void*)>> memory_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // All guarded by mutex_.
  std::array<Queue, kStreamCount> queues_;
  std::map<GroupId, Turns> turns_;
  std::chrono::steady_clock::time_point last_end_ = {};  // of any op
  bool stopping_ = false;
};

}  // namespace shardwright
