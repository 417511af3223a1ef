// Simulations of many plans of one job, on several threads. One Evaluator belongs to one thread.
//
// Two prices: Try simulates without the caching allocator (milliseconds for a few layers). Run
// replays the allocator, or places the arena of native, and verifies the program; it takes about
// ten times as long. So a search makes hundreds of the first kind and tens of the second.

#include "planner/evaluator.h"

#include <array>
#include <tuple>

#include "core/error.h"
#include "core/parallel.h"
#include "core/ranges.h"
#include "schedule/lower.h"
#include "schedule/place.h"
#include "schedule/plan_names.h"
#include "simulator/plan_programs.h"

namespace shardwright {

std::string_view NameOf(CandidateStatus status) {
  static constexpr std::array<std::string_view, 8> kNames = {
      "fits",           "over device memory", "over host memory",
      "fragmented",     "allocator retries",  "pruned by memory",
      "pruned by time", "not tried"};
  return NameIn(kNames, status);
}

// Example: a limit of 70 GiB and an outcome of 72 GiB are kOverDevice with 2 GiB missing. A host
// limit of 0 is none.
std::pair<CandidateStatus, Bytes> HoldAgainst(const Limits& limits, const Outcome& outcome) {
  if (outcome.Memory() > limits.device) {
    return {CandidateStatus::kOverDevice, outcome.Memory() - limits.device};
  }
  if (limits.host > Bytes(0) && outcome.host_peak > limits.host) {
    return {CandidateStatus::kOverHost, outcome.host_peak - limits.host};
  }
  return {CandidateStatus::kFits, Bytes(0)};
}

void SetOutcome(const Outcome& outcome, const Limits& limits, Candidate& candidate) {
  std::tie(candidate.status, candidate.deficit) = HoldAgainst(limits, outcome);
  candidate.step_time = outcome.step_time;
  candidate.memory = outcome.Memory();
  candidate.host_memory = outcome.host_peak;
}

Evaluator::Evaluator(const Problem& problem)
    : problem_(problem), simulator_(problem.cluster, problem.profile) {}

// With `compares` the memory of the buffers comes first, which takes no clock.
Outcome Evaluator::Run(const Plan& plan, const EvaluateOptions& options) {
  ++count_;
  const Bytes usable =
      options.memory_limit > Bytes(0) ? options.memory_limit : UsableMemory(problem_);
  const auto judged = [&](const SimulationResult& result, Bytes placed) {
    Outcome outcome = OutcomeOf(problem_, result);
    outcome.usable = usable;
    outcome.placed = placed;
    if (options.judges) {
      outcome.rates = RatesOf(problem_, plan, outcome.step_time);
      outcome.misfits = FindMisfits(problem_, plan, usable, placed, result);
    }
    return outcome;
  };
  if (plan.pipeline_size > 1) {  // what the allocator keeps beside buffers is not known of it
    return judged(SimulateStages(LowerAndVerifyStages(problem_, plan), problem_,
                                 options.compares ? usable : kNoLimit),
                  Bytes(0));
  }
  PlanPrograms programs({problem_, plan});
  const Program& few = programs.Largest();
  const bool has_arena = few.memory == MemoryRegime::kArena;
  SimulateOptions simulate = SimulateOptionsOf(problem_, few);
  simulate.reserved = options.reserved;
  if (options.telling != Telling::kRoughly) {
    CheckLegal(few);
  }
  if (!options.judges) {  // of many plans, the chosen one is lowered with all of its micro-batches
    const auto lowered = static_cast<double>(few.micro_batch_count);
    CheckOpCount(few.step.size(), lowered / static_cast<double>(plan.accumulation),
                 plan.accumulation);
  }
  if (options.compares) {
    SimulationResult allocated;
    allocated.memory = simulator_.Allocated(few);
    Outcome outcome = judged(allocated, Bytes(0));
    const Limits limits{usable, problem_.cluster.node.pinned_limit};
    if (HoldAgainst(limits, outcome).first != CandidateStatus::kFits) {
      return outcome;
    }
  }
  const SimulationResult result = SimulatePlan(simulator_, programs, simulate, options.telling);
  const bool is_placed = has_arena && (options.reserved || options.judges);
  Outcome outcome = judged(result, is_placed ? PlacePlan(programs) : Bytes(0));
  for (Misfit& misfit : outcome.misfits) {
    if (misfit.kind == Misfit::Kind::kFragmentation) {  // what it would reserve without an end
      simulate.allocator.capacity = Bytes(std::int64_t{1} << 50);
      const SimulationResult endless =
          SimulatePlan(simulator_, programs, simulate, options.telling);
      misfit.needed = OutcomeOf(problem_, endless).reserved + outcome.outside;
    }
  }
  return outcome;
}

Outcome Evaluate(const Problem& problem, const Plan& plan, const EvaluateOptions& options) {
  CheckPlan(problem, plan, "plan");
  return Evaluator(problem).Run(plan, options);
}

Outcome Evaluator::Try(const Plan& plan, std::optional<Bytes> limit) {
  try {
    if (plan.pipeline_size > 1) {
      ++count_;
      return TryStages(plan, limit.value_or(kNoLimit));
    }
    return Run(plan, {.reserved = false,
                      .telling = Telling::kRoughly,
                      .compares = limit.has_value(),
                      .memory_limit = limit.value_or(Bytes(0)),
                      .judges = false});
  } catch (const InputError& e) {  // a region or a unit that this model or dialect cannot have
    Outcome outcome;
    outcome.is_allowed = false;
    outcome.refusal = e.what();
    return outcome;
  }
}

// Once the pipeline is full, as many micro-batches as ranks take as long and need as much more as
// the ones before: many are told from four and six times as many as ranks.
Outcome Evaluator::TryStages(const Plan& plan, Bytes most) {
  constexpr std::int64_t kFewer = 4, kMore = 6;
  const std::int64_t ranks = plan.pipeline_size, count = plan.accumulation;
  const bool are_many = count > (kFewer + kMore) * ranks;
  Job job = problem_.job;
  job.global_batch = 0;  // that of fewer micro-batches is another one
  const auto run = [&](std::int64_t micro_batches, Bytes limit) {
    Plan few = plan;
    few.accumulation = micro_batches;
    const std::vector<Program> programs = LowerStages({problem_.model, problem_.kernels, job, few});
    return OutcomeOf(problem_, SimulateStages(programs, problem_, limit));
  };
  Outcome outcome = run(are_many ? kMore * ranks : count, most);
  if (are_many) {
    const Outcome fewer = run(kFewer * ranks, outcome.step_time.value > 0 ? kNoLimit : Bytes(0));
    const std::int64_t rest = count - kMore * ranks, step = (kMore - kFewer) * ranks;
    const double times = static_cast<double>(rest) / static_cast<double>(step);
    outcome.step_time += (outcome.step_time - fewer.step_time) * times;
    outcome.bubble += (outcome.bubble - fewer.bubble) * times;
    outcome.device_peak.total += (outcome.Memory() - fewer.Memory()) * rest / step;
  }
  return outcome;
}

Workers::Workers(const Problem& input, int threads) {
  for (std::size_t i = 0; i < ThreadCount(threads); ++i) {
    evaluators_.push_back(std::make_unique<Evaluator>(input));
  }
}

void Workers::ForEach(std::size_t count, const std::function<void(std::size_t, Evaluator&)>& task) {
  ParallelFor(count, evaluators_.size(),
              [&](std::size_t i, std::size_t worker) { task(i, *evaluators_[worker]); });
}

std::int64_t Workers::simulated() const {
  const std::int64_t sum =
      Summed<std::int64_t>(evaluators_, [&](const auto& evaluator) { return evaluator->count(); });
  return sum;
}

}  // namespace shardwright
