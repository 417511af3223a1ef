#pragma once

// Finds collectives that never end: another rank is gone, stuck, or in another collective. Knows
// neither NCCL nor CUDA: what it asks of them are functions, so that tests put their own there.
//
// collective_watch.cc has an example with 4 ranks of which one hangs.

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "executor/cuda/gpu.h"
#include "executor/host/communicator.h"

namespace shardwright {

// How far a rank has come on one communicator: its collectives are numbered from 1.
struct CollectiveProgress {
  std::int64_t submitted = 0;  // by its host thread
  std::int64_t begun = 0;      // by its stream
  std::int64_t over = 0;

  bool operator==(const CollectiveProgress&) const = default;
};

class CollectiveWatch {
 public:
  using Clock = std::chrono::steady_clock;

  struct Hooks {
    std::function<GpuEvent()> new_event;
    std::function<bool(GpuEvent event)> is_over;
    // Problem of a communicator, in words; empty: none.
    std::function<std::string(std::size_t communicator)> problem_of;
    // Tells the others how far this rank is on every communicator, and what a rank told last;
    // empty: nothing yet.
    std::function<void(const std::vector<CollectiveProgress>& mine)> tell;
    std::function<std::vector<CollectiveProgress>(std::int64_t rank)> told_by;
    // Whom of those that have not come to name (MessagePassing::AtFault); empty: all of them.
    std::function<std::set<std::int64_t>(const std::set<std::int64_t>& missing)> at_fault = {};
    // The run has failed; called once, from the watching thread.
    std::function<void(const std::string& cause)> fail;
  };

  // `timeout`: how long a collective may take from when its stream came to it; `first`: the first
  // one of a communicator, in which the ranks connect.
  CollectiveWatch(std::int64_t rank, std::chrono::milliseconds timeout,
                  std::chrono::milliseconds first, Hooks hooks);
  // Stops watching.
  ~CollectiveWatch();
  CollectiveWatch(const CollectiveWatch&) = delete;
  CollectiveWatch& operator=(const CollectiveWatch&) = delete;

  // Returns its number, from 0 on. All ranks add their communicators in the same order.
  std::size_t AddCommunicator(const GroupRanks& ranks, const std::string& name);
  // A collective that is about to be submitted. The caller records `begin` before it and `end`
  // behind it on its stream, then calls Submitted.
  struct Events {
    GpuEvent begin, end;
  };
  [[nodiscard]] Events Next(std::size_t communicator);
  void Submitted(std::size_t communicator, const std::string& op, const Events& events);

  // Looks once; returns why the run cannot go on, or an empty text.
  [[nodiscard]] std::string Look(Clock::time_point now);
  // Looks again and again on a thread of its own, until something is wrong.
  void Start();

 private:
  struct Flight {
    std::string op;
    Events events;
    std::optional<Clock::time_point> begun;
  };
  struct Communicator {
    GroupRanks ranks;
    std::string name;
    CollectiveProgress progress;
    std::deque<Flight> under_way;  // the first one has number progress.over + 1
  };

  void Update(Communicator& communicator, Clock::time_point now);
  // Tells the others what is new. A collective is told of long before one that waits for it may end
  // the run, so a few times per time-out are enough: with 512 ranks each report costs 511 messages.
  void Tell(Clock::time_point now);
  [[nodiscard]] std::chrono::milliseconds LimitOf(const Communicator& communicator) const {
    return communicator.progress.over == 0 ? first_ : timeout_;
  }
  [[nodiscard]] std::string DescribeStuck(std::size_t index,
                                          const Communicator& communicator) const;
  [[nodiscard]] std::string Place(const Communicator& communicator) const;
  // Ranks that have not come to the collective, as far as they told; else all others; of these
  // whom Hooks::at_fault names.
  [[nodiscard]] std::set<std::int64_t> Missing(std::size_t index,
                                               const Communicator& communicator) const;

  const std::int64_t rank_;
  const std::chrono::milliseconds timeout_, first_;
  const Hooks hooks_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::deque<Communicator> communicators_;
  std::vector<GpuEvent> free_events_;
  bool stopping_ = false;
  std::condition_variable stopped_;
  // Of the watching thread.
  std::vector<CollectiveProgress> told_;
  std::optional<Clock::time_point> told_at_;
  std::thread thread_;
};

}  // namespace shardwright
