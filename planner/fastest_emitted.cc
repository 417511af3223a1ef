// A settings file cannot say all of a plan. So the 16 fastest plans are emitted, read back as the
// framework will run them, and simulated in that form; the fastest of these is the answer.

#include "planner/fastest_emitted.h"

#include <iterator>
#include <utility>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "planner/evaluate.h"
#include "planner/space.h"

namespace shardwright {
namespace {

using Emitted = std::pair<PlanFile, Outcome>;

// The plan as the target will run it, whatever of it is lost; nothing where it cannot, or where
// regions meet other units as emitted.
std::optional<Emitted> AsEmitted(const Emitter& target, PlanFile file, const Plan& plan,
                                 Bytes limit) {
  file.plan = plan;
  try {
    PlanFile emitted = Emit(target, file, {}).as_emitted;
    CheckPlan(emitted, emitted.plan, "the plan as emitted");
    if (!CanRecompute(emitted.plan)) {
      return std::nullopt;
    }
    const Outcome outcome = Evaluate(emitted, emitted.plan, {.memory_limit = limit});
    return Emitted{std::move(emitted), outcome};
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
  StableSortBy(tried, &Candidate::step_time);
  tried.resize(std::min(tried.size(), kTried));
  tried.emplace_back();
  tried.back().family = tried.back().label = "the run's own";
  tried.back().plan = own;
  return tried;
}

void Choose(const Outcome& outcome, Candidate chosen, SearchResult& result) {
  chosen.step_time = outcome.step_time;
  chosen.memory = outcome.device_peak.total + outcome.outside;
  chosen.needed = outcome.DeviceTotal();
  chosen.host_memory = outcome.host_peak;
  result.best = {.index = result.candidates.size(),
                 .plan = chosen.plan,
                 .step_time = chosen.step_time,
                 .peak = outcome.device_peak,
                 .outside = outcome.outside,
                 .reserved = outcome.reserved,
                 .host_memory = outcome.host_peak,
                 .bubble = outcome.bubble};
  result.candidates.push_back(std::move(chosen));
  result.pareto = {result.best.index};
  result.proven_gap = std::max(0.0, 1 - result.lower_bound.value / result.best.step_time.value);
}

}  // namespace

bool KeepRun(const PlanFile& run, SearchResult& result) {
  const Outcome outcome = Evaluate(run, run.plan);
  const bool is_beaten = result.is_feasible && result.best.step_time <= outcome.step_time;
  if (is_beaten || !outcome.Fits() || outcome.retries_per_step > 0) {
    return false;
  }
  Candidate own;
  own.family = "the run's own";
  own.label = "no change";
  own.plan = run.plan;
  result.is_feasible = true;
  result.memory_limit = UsableMemory(run);
  const Seconds own_time = outcome.step_time;  // a bound of 0: every branch was pruned
  result.lower_bound =
      result.lower_bound.value > 0 ? std::min(result.lower_bound, own_time) : own_time;
  Choose(outcome, std::move(own), result);
  return true;
}

std::optional<PlanFile> FastestEmitted(const Plan& own, const Emitter& target, const PlanFile& job,
                                       SearchResult& result) {
  std::optional<PlanFile> best;
  Outcome best_outcome;
  Candidate chosen;
  for (Candidate& c : CandidatesOf(result, own)) {
    std::optional<Emitted> emitted = AsEmitted(target, job, c.plan, result.memory_limit);
    if (!emitted) {
      continue;
    }
    auto& [file, outcome] = *emitted;
    const Seconds time = outcome.step_time;
    if (!outcome.Fits() || outcome.retries_per_step > 0 || (best && time >= chosen.step_time)) {
      continue;
    }
    chosen = std::move(c);
    chosen.plan = file.plan;
    best = std::move(file);
    best_outcome = outcome;
    chosen.step_time = time;
  }
  if (best) {
    Choose(best_outcome, std::move(chosen), result);
  }
  return best;
}

}  // namespace shardwright
