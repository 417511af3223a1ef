#pragma once

// One step of a plan with many micro-batches, told from programs with fewer of them.
//
// After the first few, micro-batches are alike, and each makes the step longer by the same period.
// So programs with n - 2, n - 1 and n micro-batches are simulated, and the step with `a` of them is
//
//   T(a) = T(n) + (a - n) (T(n) - T(n-1))
//
// provided that both differences are equal to the picosecond, that no stream and not the host has
// more to do per micro-batch than the period (it would fall behind further and further, and decide
// the period once it is behind everything else), that compute waits for nothing less with one more,
// and that all peaks of memory are equal; what the caching allocator reserves is told only where a
// host that is further ahead changes nothing, and may come out a segment smaller under fsdp1, where
// it can take a dozen micro-batches that are alike until the allocator needs one more (1 of 300
// random plans). Otherwise more micro-batches are simulated, in the
// end all of them. So the cost of most plans does not depend on `a`.

#include <cstdint>
#include <map>

#include "schedule/lower.h"
#include "schedule/program.h"
#include "simulator/simulate.h"

namespace shardwright {

// The programs of one plan with other numbers of micro-batches, lowered when they are asked for.
// The model and the kernel set must outlive it.
class PlanPrograms {
 public:
  // Throws InputError for a plan that is not valid or whose step has too many ops.
  explicit PlanPrograms(const LowerInput& input);

  // Throws InputError for a plan that the dialect cannot express.
  [[nodiscard]] const Program& With(std::int64_t micro_batches);
  // The one with the most of those lowered so far, and at least one is: what all have in common.
  [[nodiscard]] const Program& Largest();
  [[nodiscard]] std::int64_t micro_batch_count() const { return micro_batch_count_; }

 private:
  const Model& model_;
  const KernelSetOptions& kernels_;
  Job job_;
  Plan plan_;
  std::int64_t micro_batch_count_ = 1;
  std::map<std::int64_t, Program> programs_;
};

// Without a trace. Of a step that was not simulated whole, step_time and exposed_comm are those of
// the plan, and so are the amounts of memory; `timing` and the ops that peaks stand before are
// those of the largest program. Throws InputError as Simulator::Run and Lower do.
[[nodiscard]] SimulationResult SimulatePlan(Simulator& simulator, PlanPrograms& programs,
                                            const SimulateOptions& options);

}  // namespace shardwright
