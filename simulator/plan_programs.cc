#include "simulator/plan_programs.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <utility>

namespace shardwright {
namespace {

// Fewer are simulated as they are: three programs hold as many together.
constexpr std::int64_t kMany = 12;
// Programs end with one of these numbers of micro-batches: one more each time as long as that is
// cheap, then many more, since it takes the host that long to lose its lead.
constexpr std::array<std::int64_t, 7> kEnds = {4, 5, 6, 7, 8, 32, 128};

bool SamePeak(const MemoryPeak& a, const MemoryPeak& b) {
  return a.total == b.total && a.by_category == b.by_category;
}

// Equal but for where in the program the peaks stand.
bool SameMemory(const SimulatedMemory& a, const SimulatedMemory& b) {
  constexpr std::array kPeaks = {&AllocatedMemory::device_init,  &AllocatedMemory::host_init,
                                 &AllocatedMemory::device_first, &AllocatedMemory::device_steady,
                                 &AllocatedMemory::host_first,   &AllocatedMemory::host_steady};
  const bool same_allocated = std::all_of(kPeaks.begin(), kPeaks.end(), [&](auto peak) {
    return SamePeak(a.allocated.*peak, b.allocated.*peak);
  });
  if (!same_allocated || a.reserved.has_value() != b.reserved.has_value()) {
    return false;
  }
  const auto peaks = [](const ReservedMemory& r) {
    return std::tuple(r.peak_init, r.peak_first, r.peak_steady, r.out_of_memory);
  };
  const auto fails = [](const SimulatedMemory& m) { return m.reserved->out_of_memory; };
  // What does not get through a few micro-batches does not get through many.
  return !a.reserved || (fails(a) && fails(b)) || peaks(*a.reserved) == peaks(*b.reserved);
}

// Of three values with equal differences: the one with `more` more micro-batches than the third.
// None where the differences are not equal.
template <class T>
std::optional<T> Continue(T first, T second, T third, std::int64_t more) {
  return third - second == second - first ? std::optional(third + (third - second) * more)
                                          : std::nullopt;
}

// Neither the host nor a stream has more to do in one more micro-batch than `period`, and compute
// waits for nothing less than before: a wait that gets shorter comes to an end, and then the period
// is another one.
bool AllKeepUp(const StepTiming& fewer, const StepTiming& more, SimTime period) {
  bool keep_up = more.host_issue - fewer.host_issue <= period;
  for (std::size_t s = 0; s < kStreamCount; ++s) {
    keep_up = keep_up && more.busy[s] - fewer.busy[s] <= period &&
              more.compute_idle[s] >= fewer.compute_idle[s];
  }
  return keep_up;
}

// Whether the host gets no further ahead of the device with each micro-batch.
bool HostKeepsItsLead(const StepTiming& fewer, const StepTiming& more, SimTime period) {
  const auto of_host = [](const StepTiming& t) {
    return t.host_issue + t.host_blocked + t.busy[static_cast<std::size_t>(Stream::kHost)];
  };
  return of_host(more) - of_host(fewer) == period;
}

// Whether a caching allocator waits for other streams before it reuses what the step frees, so that
// what it reserves depends on how far ahead the host is.
bool RecordsStreams(const Program& program) {
  const std::vector<MemoryPoint>& points = program.step.points;
  return std::any_of(points.begin(), points.end(),
                     [](const MemoryPoint& point) { return point.recorded_streams != 0; });
}

// The result with `count` micro-batches from those with n - 2, n - 1 and n; none where they do not
// tell.
std::optional<SimulationResult> Extrapolate(const std::array<const SimulationResult*, 3>& results,
                                            std::int64_t n, std::int64_t count) {
  const SimulationResult& first = *results[0];
  const SimulationResult& second = *results[1];
  const SimulationResult& third = *results[2];
  const std::int64_t more = count - n;
  const auto step_time = Continue(first.step_time, second.step_time, third.step_time, more);
  const auto exposed = Continue(first.exposed_comm, second.exposed_comm, third.exposed_comm, more);
  const SimTime period = third.step_time - second.step_time;
  const auto settles = [](const SimulationResult* r) {
    return r->timing.is_steady && !r->unsettled;
  };
  if (!step_time || !exposed || !std::all_of(results.begin(), results.end(), settles) ||
      !AllKeepUp(first.timing.steady, second.timing.steady, period) ||
      !AllKeepUp(second.timing.steady, third.timing.steady, period) ||
      !SameMemory(first.memory, second.memory) || !SameMemory(second.memory, third.memory)) {
    return std::nullopt;
  }
  SimulationResult result = third;
  result.step_time = *step_time;
  result.exposed_comm = *exposed;
  if (third.memory.reserved) {
    for (std::int64_t ReservedMemory::*retries :
         {&ReservedMemory::retries_first, &ReservedMemory::retries_steady}) {
      const auto number =
          Continue((*first.memory.reserved).*retries, (*second.memory.reserved).*retries,
                   (*third.memory.reserved).*retries, more);
      if (!number && !third.memory.reserved->out_of_memory) {
        return std::nullopt;
      }
      (*result.memory.reserved).*retries = number.value_or((*third.memory.reserved).*retries);
    }
  }
  return result;
}

}  // namespace

PlanPrograms::PlanPrograms(const LowerInput& input)
    : model_(input.model),
      kernels_(input.kernels),
      job_(input.job),
      plan_(input.plan),
      micro_batch_count_(input.plan.accumulation) {
  ValidatePlan(input.model, input.job, input.plan, "plan");
  job_.global_batch = 0;  // that of fewer micro-batches is another one
}

const Program& PlanPrograms::With(std::int64_t micro_batches) {
  const auto known = programs_.find(micro_batches);
  if (known != programs_.end()) {
    return known->second;
  }
  plan_.accumulation = micro_batches;
  const auto& [n, program] =
      *programs_.emplace(micro_batches, Lower({model_, kernels_, job_, plan_})).first;
  CheckOpCount(program.step.size(), n, micro_batch_count_);
  return program;
}

const Program& PlanPrograms::Largest() {
  return !programs_.empty()            ? programs_.rbegin()->second
         : micro_batch_count_ >= kMany ? With(kEnds.front())
                                       : With(micro_batch_count_);
}

SimulationResult SimulatePlan(Simulator& simulator, PlanPrograms& programs,
                              const SimulateOptions& options) {
  const std::int64_t count = programs.micro_batch_count();
  std::map<std::int64_t, SimulationResult> known;
  const auto run = [&](std::int64_t n) -> const SimulationResult& {
    const auto found = known.find(n);
    return found != known.end()
               ? found->second
               : known.emplace(n, simulator.Run(programs.With(n), options)).first->second;
  };
  for (const std::int64_t n : kEnds) {
    if (count < std::max(kMany, 3 * n)) {
      break;
    }
    auto result = Extrapolate({&run(n - 2), &run(n - 1), &run(n)}, n, count);
    const auto lead_may_matter = [&] {
      return options.reserved && RecordsStreams(programs.With(n)) &&
             !HostKeepsItsLead(run(n - 1).timing.steady, run(n).timing.steady,
                               run(n).step_time - run(n - 1).step_time);
    };
    if (result && !lead_may_matter()) {
      return std::move(*result);
    }
  }
  return run(count);
}

}  // namespace shardwright
