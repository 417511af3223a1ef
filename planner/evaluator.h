#pragma once

// Plans of one job evaluated by the simulator, on several threads.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "planner/evaluate.h"
#include "planner/search.h"

namespace shardwright {

struct Limits {
  Bytes device;
  Bytes host;  // 0: not known, not checked
};

// Which limit the outcome breaks, and by how much; kFits and 0 if none.
[[nodiscard]] std::pair<CandidateStatus, Bytes> HoldAgainst(const Limits& limits,
                                                            const Outcome& outcome);

// Writes what was simulated, and how it stands to the limits, into `candidate`.
void SetOutcome(const Outcome& outcome, const Limits& limits, Candidate& candidate);

// Lowers and simulates plans of one job. One per thread; the problem must outlive it.
class Evaluator {
 public:
  explicit Evaluator(const Problem& problem);

  // Throws InputError as Lower does.
  [[nodiscard]] Outcome Run(const Plan& plan, const EvaluateOptions& options);
  // One of many plans: roughly, without the caching allocator and a verdict. A plan that cannot be
  // lowered is not allowed. One whose buffers take more than `limit` has no time.
  [[nodiscard]] Outcome Try(const Plan& plan, std::optional<Bytes> limit = {});

  [[nodiscard]] std::int64_t count() const { return count_; }

 private:
  [[nodiscard]] Outcome TryStages(const Plan& plan, Bytes most);

  const Problem& problem_;
  Simulator simulator_;
  std::int64_t count_ = 0;
};

// Threads that share a queue of tasks. Results must not depend on who runs what.
class Workers {
 public:
  Workers(const Problem& input, int threads);

  // Calls task(i, evaluator) for i in [0, count), in any order, and returns when all are done.
  // Rethrows the exception of the task with the lowest index.
  void ForEach(std::size_t count, const std::function<void(std::size_t, Evaluator&)>& task);
  [[nodiscard]] std::int64_t simulated() const;
  [[nodiscard]] Evaluator& first() { return *evaluators_.front(); }

 private:
  std::vector<std::unique_ptr<Evaluator>> evaluators_;
};

}  // namespace shardwright
