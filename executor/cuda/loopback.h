#pragma once

// Collectives between ranks that share one GPU: every rank is a thread with its own streams and
// arena, all-gathers are copies, sums are folds in rank order. So the whole device runs with
// several ranks where there is one GPU, or none but an emulated one.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "executor/call.h"
#include "executor/cuda/gpu_group.h"
#include "executor/host/fault.h"

namespace shardwright {

// The host threads meet, so that events are recorded before others wait for them.
class LoopbackGroup : public GpuGroup {
 public:
  LoopbackGroup(std::int64_t size, std::int64_t first_rank, std::int64_t stride,
                std::chrono::milliseconds timeout, FaultBoard& faults);

  void Submit(std::int64_t member, const CollectiveCall& call, const std::string& name,
              const CollectivePlace& place) override;

 private:
  struct Post {
    const CollectiveCall* call = nullptr;
    const std::string* name = nullptr;
    GpuEvent ready, summed, done;
    bool is_here = false;
  };
  void Meet(std::int64_t member, const std::string& name);
  void CheckAlike(const Post& mine) const;
  void Gather(std::int64_t member, const CollectiveCall& call, const CollectivePlace& place) const;
  void ReducePart(std::int64_t member, const CollectiveCall& call,
                  const CollectivePlace& place) const;
  void CopyOtherParts(std::int64_t member, const CollectiveCall& call,
                      const CollectivePlace& place) const;
  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(posts_.size()); }

  const std::int64_t first_rank_, stride_;
  const std::chrono::milliseconds timeout_;
  FaultBoard& faults_;
  std::mutex mutex_;
  std::condition_variable met_;
  std::vector<Post> posts_;  // written before a meeting under mutex_, read between two meetings
  std::int64_t here_ = 0;    // guarded by mutex_, like meeting_
  std::uint64_t meeting_ = 0;
  bool has_left_ = false;  // a member gave a meeting up
};

}  // namespace shardwright
