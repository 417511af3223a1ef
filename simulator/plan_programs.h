#pragma once

// One step of a plan with many micro-batches, told from programs with fewer of them.
//
// After the first few, micro-batches are alike, and each makes the step longer by the same period.
// So programs with n - 2, n - 1 and n micro-batches are simulated, where n - 2 is past the ones
// that the lowering itself makes unlike (CountUnlike). The step with `a` micro-batches then takes
//
//   T(a) = T(n) + (a - n) (T(n) - T(n-1))
//
// Example: T(4) = 40 ms, T(5) = 47 ms, T(6) = 54 ms: both differences are 7 ms, so 100
// micro-batches take 54 + 94 x 7 = 712 ms. So the cost of most plans does not depend on `a`.
//
// The rule counts only if
//   - both differences are equal to the picosecond;
//   - neither the host nor a stream has more work per micro-batch than the period. It would fall
//     behind further and further, and decide the period once it is behind everything else;
//   - compute waits for nothing less with one micro-batch more;
//   - all peaks of memory are equal.
// Otherwise more micro-batches are simulated, in the end all of them.
//
// The reserved memory of the caching allocator is told only where the host gets no further ahead,
// or where that changes nothing. Under fsdp1 it may come out a segment too small: it can take a
// dozen micro-batches that are alike until the allocator needs one more (1 of 300 random plans).

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "core/units.h"
#include "schedule/lower.h"
#include "schedule/program.h"
#include "simulator/attribution.h"
#include "simulator/device_time.h"
#include "simulator/simulate.h"

namespace shardwright {

// The programs of one plan with other numbers of micro-batches, lowered when they are asked for.
// The model and the kernel set must outlive it.
class PlanPrograms {
 public:
  // Throws InputError for a plan that is not valid.
  explicit PlanPrograms(const LowerInput& input);

  // Throws InputError for a plan that the dialect cannot express, and for too many ops.
  [[nodiscard]] const Program& With(std::int64_t micro_batches);
  // The one with the most of those lowered so far, and at least one is: what all have in common.
  [[nodiscard]] const Program& Largest();
  [[nodiscard]] std::int64_t micro_batch_count() const { return micro_batch_count_; }
  // How many micro-batches at the beginning are not like those behind them: 1, or as many as fill
  // the queue of reductions in flight, where a dialect has one.
  [[nodiscard]] std::int64_t CountUnlike();
  // The micro-batch of the whole plan that an op of With(micro_batches) stands for: those of the
  // first half are counted from the first, the others from the last.
  [[nodiscard]] std::int64_t InPlan(const Op& op, std::int64_t micro_batches) const {
    return op.micro_batch < (micro_batches + 1) / 2
               ? op.micro_batch
               : op.micro_batch + micro_batch_count_ - micro_batches;
  }
  // Numbers the micro-batches of With(micro_batches) as those they stand for, so that its ops are
  // called as in the whole plan. Once, and last of all.
  void NumberAsInPlan(std::int64_t micro_batches);

 private:
  const Model& model_;
  const KernelSetOptions& kernels_;
  Job job_;
  Plan plan_;
  std::int64_t micro_batch_count_ = 1;
  std::int64_t unlike_count_ = 0;  // 0: not counted yet
  std::map<std::int64_t, Program> programs_;
};

// How sure the answer for a step of many micro-batches has to be.
enum class Telling : std::uint8_t {
  kProven,  // as said above
  // For who only asks whether the caching allocator takes the plan as it is. One that fails with
  // some number of micro-batches is not simulated with others, and has the time of that number. One
  // that retries with each of three is not simulated with more: then the time goes on by the last
  // difference, whether or not it is steady, and the rest is the largest program's.
  kUntilRetries,
  // For callers that want the time of any plan, also of one whose caching allocator retries. Such a
  // plan goes on by the average time of a micro-batch between the 8th and the 16th, with the memory
  // of the program with 16. Retries come and go in no order, so only all micro-batches would prove
  // the time. Where retries end later, the plan is told too slow. A plan that fails has no time of
  // the whole step, as with kUntilRetries.
  kOnAverage,
  // For callers that compare many plans and look at the best ones again. Programs with two and
  // three micro-batches are simulated (more where CountUnlike is), and the memory is the larger
  // one's. Each further micro-batch takes as long as the third did, but no less than the work that
  // the host or a stream has for it. If two differences are equal, they prove the time as with
  // kProven.
  kRoughly,
};

// Without a trace. If the step was not simulated whole, step_time, exposed_comm and the amounts of
// memory are still those of the plan. `timing` and the ops before which peaks stand are those of
// the largest program. kRoughly: requires options without reserved memory. Throws InputError as
// Simulator::Run and Lower do.
[[nodiscard]] SimulationResult SimulatePlan(Simulator& simulator, PlanPrograms& programs,
                                            const SimulateOptions& options,
                                            Telling telling = Telling::kProven);

// The device's arena (Place) of the whole plan: what three programs have in common whose numbers of
// micro-batches follow one another; where none do, of all of it. Where buffers lie depends on all
// that lay there before, so an arena may still grow after a dozen micro-batches that are alike (by
// 1 % at most in 200 random plans, in 1 of them).
[[nodiscard]] Bytes PlacePlan(PlanPrograms& programs);

// The ops of one step of the whole plan, told likewise.
[[nodiscard]] std::int64_t CountStepOps(PlanPrograms& programs);

// Where the time of a step goes, and what its buffers take at fixed offsets.
struct StepAccount {
  Attribution attribution;
  DeviceTime device;
  Bytes placed;
  std::vector<SimTime> sums;  // of the caller's own, see SumSpans
};
// Sums over the last step of a result with a trace, which grow with it.
using SumSpans = std::function<std::vector<SimTime>(const Program&, const SimulationResult&)>;
// Requires a result with a trace.
[[nodiscard]] StepAccount AccountFor(const Program& program, const SimulationResult& result,
                                     const SumSpans& sum_spans);

// As SimulatePlan, and told only where all parts of the account and of `timing` grow by the same
// for each micro-batch, too, and the largest peak stands at the same op. The trace is there only if
// the step was simulated whole. A told account has no critical path, only its sums; ops that peaks
// stand before are those of Largest(), which is numbered as the plan then.
struct AccountedStep {
  SimulationResult result;
  StepAccount account;
};
[[nodiscard]] AccountedStep AccountForPlan(Simulator& simulator, PlanPrograms& programs,
                                           SimulateOptions options, const SumSpans& sum_spans);

}  // namespace shardwright
