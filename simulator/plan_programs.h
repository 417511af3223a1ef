#pragma once

// One step of a plan with many micro-batches, told from programs with fewer of them.
//
// After the first few, micro-batches are alike, and each makes the step longer by the same period.
// So programs with n - 2, n - 1 and n micro-batches are simulated, where n - 2 is past those that
// the lowering itself makes unlike (CountUnlike), and the step with `a` of them is
//
//   T(a) = T(n) + (a - n) (T(n) - T(n-1))
//
// provided that both differences are equal to the picosecond, that no stream and not the host has
// more to do per micro-batch than the period (it would fall behind further and further, and decide
// the period once it is behind everything else), that compute waits for nothing less with one more,
// and that all peaks of memory are equal; what the caching allocator reserves is told only where
// the host gets no further ahead, or that changes nothing, and may come out a segment smaller under
// fsdp1, where it can take a dozen micro-batches that are alike until the allocator needs one more
// (1 of 300 random plans). Otherwise more micro-batches are simulated, in the end all of them. So
// the cost of most plans does not depend on `a`.

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
  // For who wants the time of a plan, good or not: one whose caching allocator retries goes on by
  // what a micro-batch takes on average between the 8th and the 16th, and holds what the program
  // with 16 does. Retries come and go in no order, so that only all micro-batches would prove it;
  // where they come to an end later, the plan is told too slow.
  // One that fails has no time of the whole step, as with kUntilRetries.
  kOnAverage,
  // For who compares many plans and looks at the best ones again: programs with two and three
  // micro-batches (more where CountUnlike is), and the larger one's memory. Each more takes as long
  // as the third did, but all of them no less than the host or a stream has to do. Where two
  // differences are equal, that is what they prove.
  kRoughly,
};

// Without a trace. Of a step that was not simulated whole, step_time and exposed_comm are those of
// the plan, and so are the amounts of memory; `timing` and the ops that peaks stand before are
// those of the largest program. kRoughly: requires options without reserved memory. Throws
// InputError as Simulator::Run and Lower do.
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
