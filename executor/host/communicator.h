#pragma once

// Collectives among a group of ranks.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "core/units.h"
#include "executor/call.h"
#include "executor/host/arithmetic.h"
#include "executor/host/clock.h"
#include "executor/host/fault.h"
#include "executor/host/message_passing.h"

namespace shardwright {

// A group's members: `first` + i * `stride` is member i's rank.
struct GroupRanks {
  std::int64_t size = 1;
  std::int64_t first = 0;
  std::int64_t stride = 1;
};

// One group of ranks. Each member calls Run from one thread at a time, all members with the same
// collectives in the same order. Sums are left folds in member order, so every member computes the
// same bits as a single rank that adds the parts one by one.
class Communicator {
 public:
  virtual ~Communicator() = default;

  struct Times {
    SimTime start;  // the last member arrived
    SimTime end;    // this member may use the result
  };
  // One collective of member `member`, which was ready at `arrival`. It lasts at least
  // `least_duration`. Throws RunError when another rank fails, does not come, or comes with another
  // collective.
  virtual Times Run(std::int64_t member, const CollectiveCall& call, const std::string& name,
                    SimTime arrival, SimTime least_duration) = 0;

 protected:
  // What member `own` of `size` sends to each, or receives from each: in an all-to-all, round
  // a ring, or between two neighbours of a pipeline. Throws RunError where the numbers of rows,
  // which other ranks say, are more than there is room for.
  static std::vector<MessagePart> PartsOf(const CollectiveCall& call, bool receives,
                                          std::int64_t own, std::int64_t size,
                                          const std::string& name);
};

// Between the ranks of one process, which are threads: everybody reads the others' memory directly.
class ThreadCommunicator : public Communicator {
 public:
  // `timeout` is how long a member waits for the others.
  ThreadCommunicator(const GroupRanks& ranks, std::chrono::milliseconds timeout,
                     const RunClock& clock, FaultBoard& faults);

  // All members end together.
  Times Run(std::int64_t member, const CollectiveCall& call, const std::string& name,
            SimTime arrival, SimTime least_duration) override;

 private:
  struct Post {
    const CollectiveCall* call = nullptr;
    const std::string* name = nullptr;
    bool is_here = false;
  };
  // Waits for all members; returns the largest `time` any of them brought.
  SimTime Meet(std::int64_t member, const std::string& name, SimTime time);
  void CheckAlike(std::int64_t member) const;
  void Gather(std::int64_t member, const CollectiveCall& call) const;
  void ReducePart(std::int64_t member, const CollectiveCall& call) const;
  void CopyOtherParts(std::int64_t member, const CollectiveCall& call) const;
  void AllToAll(std::int64_t member, const CollectiveCall& call, const std::string& name) const;
  [[nodiscard]] std::set<std::int64_t> Missing() const;
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(posts_.size()); }

  const GroupRanks ranks_;
  const std::chrono::milliseconds timeout_;
  const RunClock& clock_;
  FaultBoard& faults_;

  std::mutex mutex_;
  std::condition_variable met_;
  // Written under mutex_ before a meeting, read freely between two meetings.
  std::vector<Post> posts_;
  std::int64_t here_ = 0;          // guarded by mutex_
  std::uint64_t meeting_ = 0;      // guarded by mutex_
  bool has_left_ = false;          // a member gave a meeting up; guarded by mutex_
  SimTime latest_{0}, result_{0};  // guarded by mutex_
};

}  // namespace shardwright
