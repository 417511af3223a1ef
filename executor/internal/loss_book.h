#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "executor/runtime.h"

namespace shardwright {

// Collects the losses of a step from all ranks; the last rank to come reports it. Called by all
// host threads.
class Runtime::LossBook {
 public:
  LossBook(std::int64_t ranks, const RunOptions& options) : ranks_(ranks), options_(options) {}

  void Enter(std::int64_t step, Rank rank, const RankReport& of_rank);
  [[nodiscard]] std::vector<StepReport> Take();

 private:
  struct Page {
    std::vector<std::vector<float>> losses;  // by rank
    std::int64_t entered = 0;
    SimTime end;
  };

  const std::int64_t ranks_;
  const RunOptions& options_;
  std::mutex mutex_;
  std::map<std::int64_t, Page> open_;  // by step; guarded by mutex_, like reports_
  std::vector<StepReport> reports_;
};

}  // namespace shardwright
