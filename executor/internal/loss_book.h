#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "executor/runtime.h"

namespace shardwright {

// Collects the losses of a step from all ranks; the last rank to come reports it. Also where they
// agree on an early end: no rank begins a step that none has begun when somebody asks to stop. (Of
// ranks in processes all know then what all know, and have begun the same step.) Called by all host
// threads.
class Runtime::LossBook {
 public:
  // `stage`: the rank of a pipeline that has its last stage, and knows the losses; 0 without one.
  LossBook(const Mesh& mesh, const RunOptions& options, std::int64_t stage)
      : mesh_(mesh), options_(options), stage_(stage) {}

  // Before steps from number `step` on are begun.
  void Open(std::int64_t step);
  // False: nobody begins this step any more.
  [[nodiscard]] bool Begin(std::int64_t step);
  // The one behind the last that was begun.
  [[nodiscard]] std::int64_t NextStep();
  // Whether a step since Open has told that no further one shall begin.
  [[nodiscard]] bool Ends();
  void Enter(std::int64_t step, Rank rank, const RankReport& of_rank);
  [[nodiscard]] std::vector<StepReport> Take();

 private:
  struct Page {
    std::vector<std::vector<float>> losses;  // by rank
    std::int64_t entered = 0;
    std::optional<float> squared_norm;
    SimTime end;
  };

  const Mesh mesh_;
  const RunOptions& options_;
  const std::int64_t stage_;
  std::mutex mutex_;
  std::map<std::int64_t, Page> open_;  // by step; guarded by mutex_, like reports_
  std::vector<StepReport> reports_;
  std::int64_t next_ = 0;  // the first step that no rank has begun; guarded by mutex_, like ends_
  bool ends_ = false;      // no further step is begun
};

}  // namespace shardwright
