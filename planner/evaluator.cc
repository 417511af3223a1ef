// Simulations of many plans of one job, on several threads. One Evaluator belongs to one thread.
//
// Two prices: Run simulates without the caching allocator (milliseconds for a few layers). RunFinal
// replays the allocator, or places the arena of native, and verifies the program; it takes about
// ten times as long. So a search runs hundreds of the first kind and tens of the second.

#include "planner/evaluator.h"

#include <array>
#include <tuple>

#include "core/error.h"
#include "core/parallel.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
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
  if (outcome.memory > limits.device) {
    return {CandidateStatus::kOverDevice, outcome.memory - limits.device};
  }
  if (limits.host > Bytes(0) && outcome.host_memory > limits.host) {
    return {CandidateStatus::kOverHost, outcome.host_memory - limits.host};
  }
  return {CandidateStatus::kFits, Bytes(0)};
}

void SetOutcome(const Outcome& outcome, const Limits& limits, Candidate& candidate) {
  std::tie(candidate.status, candidate.deficit) = HoldAgainst(limits, outcome);
  candidate.step_time = outcome.time;
  candidate.memory = outcome.memory;
  candidate.host_memory = outcome.host_memory;
}

Evaluator::Evaluator(const Problem& input) : in_(input), simulator_(input.cluster, input.profile) {}

// Host memory is that of a node: 10 GiB of one rank on a node of 8 GPUs are 80 GiB.
Outcome Evaluator::OutcomeOf(const SimulationResult& result) const {
  Outcome outcome;
  outcome.time = ToSeconds(result.step_time);
  outcome.bubble = ToSeconds(result.bubble);
  outcome.peak = result.memory.allocated.DevicePeak();
  outcome.outside = result.memory.outside;
  outcome.memory = outcome.peak.total + outcome.outside;
  outcome.host_memory = result.memory.allocated.HostPeak().total * in_.cluster.gpus_per_node;
  return outcome;
}

// With limits, memory is measured first, which needs no clock; a plan that does not fit gets no
// time.
Outcome Evaluator::Run(const Plan& plan, const Limits* limits) {
  ++count_;
  std::optional<PlanPrograms> programs;
  try {
    if (plan.pipeline_size > 1) {
      return RunStages(plan, limits != nullptr ? limits->device : kNoLimit);
    }
    programs.emplace(LowerInput{in_, plan});
    // The chosen plan is lowered with all of its micro-batches.
    const Program& few = programs->Largest();
    const auto lowered = static_cast<double>(few.micro_batch_count);
    CheckOpCount(few.step.size(), lowered / static_cast<double>(plan.accumulation),
                 plan.accumulation);
  } catch (const InputError& e) {  // a region or a unit that this model or dialect cannot have
    Outcome outcome;
    outcome.is_allowed = false;
    outcome.refusal = e.what();
    return outcome;
  }
  // A time takes programs with other numbers of micro-batches; memory is the largest one's.
  if (limits != nullptr) {
    SimulationResult allocated;
    allocated.memory = simulator_.Allocated(programs->Largest());
    Outcome outcome = OutcomeOf(allocated);
    if (HoldAgainst(*limits, outcome).first != CandidateStatus::kFits) {
      return outcome;
    }
  }
  SimulateOptions options;
  options.reserved = false;
  return OutcomeOf(SimulatePlan(simulator_, *programs, options, Telling::kRoughly));
}

// Once the pipeline is full, as many micro-batches as ranks take as long and need as much more as
// the ones before: many are told from four and six times as many as ranks.
Outcome Evaluator::RunStages(const Plan& plan, Bytes most) {
  constexpr std::int64_t kFewer = 4, kMore = 6;
  const std::int64_t ranks = plan.pipeline_size, count = plan.accumulation;
  const bool are_many = count > (kFewer + kMore) * ranks;
  Job job = in_.job;
  job.global_batch = 0;  // that of fewer micro-batches is another one
  const auto run = [&](std::int64_t micro_batches, Bytes limit) {
    Plan few = plan;
    few.accumulation = micro_batches;
    return OutcomeOf(SimulateStages(LowerStages({in_.model, in_.kernels, job, few}), in_, limit));
  };
  Outcome outcome = run(are_many ? kMore * ranks : count, most);
  if (are_many) {
    const Outcome fewer = run(kFewer * ranks, outcome.time.value > 0 ? kNoLimit : Bytes(0));
    const std::int64_t rest = count - kMore * ranks, step = (kMore - kFewer) * ranks;
    const double times = static_cast<double>(rest) / static_cast<double>(step);
    outcome.time += (outcome.time - fewer.time) * times;
    outcome.bubble += (outcome.bubble - fewer.bubble) * times;
    const Bytes more = (outcome.memory - fewer.memory) * rest / step;
    outcome.memory += more;
    outcome.peak.total += more;
  }
  return outcome;
}

// `needed` is the memory of the GPU in use at the worst moment: reserved, or placed by native, and
// the bytes outside the allocator. Native's arena never retries.
Outcome Evaluator::RunFinal(const Plan& plan, Bytes limit, bool is_exact) {
  ++count_;
  if (plan.pipeline_size > 1) {  // what the allocator keeps beside buffers is not known of it
    Outcome outcome = OutcomeOf(SimulateStages(LowerAndVerifyStages(in_, plan), in_, limit));
    outcome.reserved = outcome.peak.total;
    outcome.needed = outcome.memory;
    outcome.fits = outcome.needed <= limit;
    return outcome;
  }
  PlanPrograms programs({in_, plan});
  CheckLegal(programs.Largest());
  const bool has_arena = programs.Largest().memory == MemoryRegime::kArena;
  const SimulationResult result =
      SimulatePlan(simulator_, programs, SimulateOptionsOf(in_, programs.Largest()),
                   is_exact ? Telling::kProven : Telling::kUntilRetries);
  const ReservedMemory& reserved = *result.memory.reserved;
  Outcome outcome = OutcomeOf(result);
  outcome.reserved = std::max(reserved.peak_first, reserved.peak_steady);
  outcome.needed = (has_arena ? PlacePlan(programs) : outcome.reserved) + outcome.outside;
  outcome.fits = !reserved.out_of_memory && (!has_arena || outcome.needed <= limit);
  outcome.retries = has_arena ? 0 : std::max(reserved.retries_first, reserved.retries_steady);
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
