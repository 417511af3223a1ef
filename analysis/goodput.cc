#include "analysis/goodput.h"

#include <algorithm>
#include <cmath>

#include <boost/math/special_functions/lambert_w.hpp>

#include "core/error.h"

namespace shardwright {
namespace {

RunEstimate EstimateWith(std::int64_t steps, Seconds step_time, std::int64_t interval_steps,
                         const FailureModel& model) {
  RunEstimate run;
  run.steps = steps;
  run.interval_steps = std::min(interval_steps, steps);
  run.work = step_time * static_cast<double>(steps);
  const std::int64_t full = steps / run.interval_steps;
  const std::int64_t rest = steps % run.interval_steps;
  run.checkpoints = full + (rest > 0 ? 1 : 0);
  const auto stretch = [&](std::int64_t count) {
    const Seconds work = step_time * static_cast<double>(count);
    return ExpectedStretch(work + model.checkpoint_time, model);
  };
  run.expected = stretch(run.interval_steps) * static_cast<double>(full);
  if (rest > 0) {
    run.expected += stretch(rest);
  }
  run.expected_failures = run.expected.value / JobMtbf(model).value;
  run.checkpointing = model.checkpoint_time * static_cast<double>(run.checkpoints);
  run.lost = run.expected - run.work - run.checkpointing;
  return run;
}

}  // namespace

Seconds JobMtbf(const FailureModel& model) {
  return model.node_mtbf / static_cast<double>(model.nodes);
}

Seconds ExpectedStretch(Seconds stretch, const FailureModel& model) {
  const double mtbf = JobMtbf(model).value;
  return Seconds(mtbf * std::exp(model.restart_time.value / mtbf) *
                 std::expm1(stretch.value / mtbf));
}

Seconds BestInterval(const FailureModel& model) {
  const double mtbf = JobMtbf(model).value;
  const double cost = model.checkpoint_time.value / mtbf;
  if (cost < 1e-6) {
    // -e^(-cost - 1) is too close to the branch point of W to be told from it; the terms left out
    // of this expansion (Daly, equation 37) are below 1e-9 of the first.
    const double half = cost / 2.0;
    return Seconds(mtbf *
                   (std::sqrt(2.0 * cost) * (1.0 + std::sqrt(half) / 3.0 + half / 9.0) - cost));
  }
  return Seconds(mtbf * (1.0 + boost::math::lambert_w0(-std::exp(-cost - 1.0))));
}

RunEstimate EstimateRun(std::int64_t steps, Seconds step_time, std::int64_t interval_steps,
                        const FailureModel& model) {
  SW_CHECK(steps > 0 && step_time.value > 0 && model.nodes > 0 && model.node_mtbf.value > 0,
           "a run has steps, and nodes that fail now and then");
  if (interval_steps > 0) {
    return EstimateWith(steps, step_time, interval_steps, model);
  }
  // The expectation per step is convex in the interval, so the best whole number of steps is next
  // to the best time. A last stretch that is cut short may favour another neighbour; it is one of
  // many.
  const double best = BestInterval(model).value / step_time.value;
  const auto below =
      static_cast<std::int64_t>(std::clamp(std::floor(best), 1.0, static_cast<double>(steps)));
  const RunEstimate a = EstimateWith(steps, step_time, below, model);
  const RunEstimate b = EstimateWith(steps, step_time, std::min(below + 1, steps), model);
  return a.expected <= b.expected ? a : b;
}

}  // namespace shardwright
