#include "planner/fastest_emitted.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "core/error.h"
#include "planner/evaluate.h"

namespace shardwright {
namespace {

// The plan as the target will run it, whatever of it is lost; nothing where it cannot.
std::optional<PlanFile> AsEmitted(const Emitter& target, PlanFile file, const Plan& plan) {
  file.plan = plan;
  try {
    return Emit(target, file, {}).as_emitted;
  } catch (const InputError&) {
    return std::nullopt;
  }
}

// The fastest that fit, and last of all the run's own.
std::vector<Candidate> CandidatesOf(const SearchResult& result, const Plan& own) {
  constexpr std::size_t kTried = 16;
  std::vector<Candidate> tried;
  std::copy_if(result.candidates.begin(), result.candidates.end(), std::back_inserter(tried),
               [](const Candidate& c) {
                 return c.status == CandidateStatus::kFits && !c.plan.units.empty();
               });
  std::stable_sort(tried.begin(), tried.end(), [](const Candidate& a, const Candidate& b) {
    return a.step_time < b.step_time;
  });
  tried.resize(std::min(tried.size(), kTried));
  tried.emplace_back();
  tried.back().family = tried.back().label = "the run's own";
  tried.back().plan = own;
  return tried;
}

}  // namespace

std::optional<PlanFile> FastestEmitted(const Plan& own, const Emitter& target, const PlanFile& job,
                                       SearchResult& result) {
  std::optional<PlanFile> best;
  Candidate chosen;
  for (Candidate& c : CandidatesOf(result, own)) {
    const std::optional<PlanFile> file = AsEmitted(target, job, c.plan);
    if (!file) {
      continue;
    }
    const PlanOutcome outcome = Evaluate(*file, {.memory_limit = result.memory_limit});
    const Seconds time = ToSeconds(outcome.step_time);
    if (!outcome.Fits() || outcome.retries_per_step > 0 || (best && time >= chosen.step_time)) {
      continue;
    }
    best = file;
    chosen = std::move(c);
    chosen.plan = file->plan;
    chosen.step_time = time;
    chosen.memory = outcome.device_peak.total + outcome.outside;
    chosen.needed = outcome.DeviceTotal();
    chosen.host_memory = outcome.host_peak;
    result.best = {.index = result.candidates.size(),
                   .plan = file->plan,
                   .step_time = time,
                   .peak = outcome.device_peak,
                   .outside = outcome.outside,
                   .reserved = outcome.reserved,
                   .host_memory = outcome.host_peak};
  }
  if (best) {
    result.candidates.push_back(std::move(chosen));
    result.pareto = {result.best.index};
    result.proven_gap = std::max(0.0, 1 - result.lower_bound.value / result.best.step_time.value);
  }
  return best;
}

}  // namespace shardwright
