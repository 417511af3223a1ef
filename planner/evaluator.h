#pragma once

// Exact evaluation of plans by the simulator, on several threads.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "planner/search.h"
#include "simulator/simulate.h"

namespace shardwright {

// What a plan costs. The caching allocator is in it by RunFinal alone.
struct Outcome {
  bool is_allowed = true;  // false: the dialect cannot express the plan
  std::string refusal;     // then, why, as far as it was lowered
  Seconds time;
  Seconds bubble;   // of a pipeline, in the mean of its ranks
  MemoryPeak peak;  // allocated on the device
  Bytes outside;
  Bytes memory;       // peak and outside
  Bytes host_memory;  // page-locked, per node
  // Of RunFinal.
  Bytes reserved;
  std::int64_t retries = 0;  // in the first step and in each of the others
  Bytes needed;              // reserved (native: the arena) and outside
  bool fits = false;
};

struct Limits {
  Bytes device;
  Bytes host;  // 0: not known, not checked
};

// Which limit the outcome breaks, and by how much; kFits and 0 if none.
[[nodiscard]] std::pair<CandidateStatus, Bytes> HoldAgainst(const Limits& limits,
                                                            const Outcome& outcome);

// Writes what was simulated, and how it stands to the limits, into `candidate`.
void SetOutcome(const Outcome& outcome, const Limits& limits, Candidate& candidate);

// Lowers and simulates plans of one job. One per thread; the input must outlive it.
class Evaluator {
 public:
  explicit Evaluator(const Problem& input);

  // With limits there is no time where the plan breaks them: only its memory is looked at.
  [[nodiscard]] Outcome Run(const Plan& plan, const Limits* limits = nullptr);
  // The same with the caching allocator, or native's arena held against `limit`; a program of the
  // plan is verified, too. Not `is_exact`: time and amounts of what retries need not be those of
  // all micro-batches.
  [[nodiscard]] Outcome RunFinal(const Plan& plan, Bytes limit, bool is_exact = false);

  [[nodiscard]] std::int64_t count() const { return count_; }

 private:
  [[nodiscard]] Outcome RunStages(const Plan& plan, Bytes most);
  [[nodiscard]] Outcome OutcomeOf(const SimulationResult& result) const;

  const Problem& in_;
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
