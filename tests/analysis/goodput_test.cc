#include "analysis/goodput.h"

#include <cmath>
#include <cstdint>
#include <random>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

FailureModel Model(double node_hours, std::int64_t nodes, double checkpoint, double restart) {
  return {Seconds(node_hours * 3600), nodes, Seconds(checkpoint), Seconds(restart)};
}

TEST_CASE("JobMtbf: the nodes fail independently") {
  CHECK(JobMtbf(Model(1000, 250, 0, 0)).value == doctest::Approx(4 * 3600));
}

// One run, failure by failure.
double RunOnce(std::int64_t steps, double step, std::int64_t interval, const FailureModel& model,
               std::mt19937_64& random) {
  std::exponential_distribution<double> until(1.0 / JobMtbf(model).value);
  double clock = 0;
  double failure = until(random);
  std::int64_t saved = 0;
  while (saved < steps) {
    const std::int64_t count = std::min(interval, steps - saved);
    const double end = clock + static_cast<double>(count) * step + model.checkpoint_time.value;
    if (end <= failure) {
      clock = end;
      saved += count;
      continue;
    }
    clock = failure;
    failure = clock + until(random);
    while (clock + model.restart_time.value > failure) {  // fails again while it restarts
      clock = failure;
      failure = clock + until(random);
    }
    clock += model.restart_time.value;
  }
  return clock;
}

TEST_CASE("EstimateRun: the mean of runs with drawn failures") {
  std::mt19937_64 random(5);
  // Failures per run: 0.3, 8 and 60; the last stretch is cut short in all but the second.
  const struct {
    FailureModel model;
    std::int64_t interval;
  } cases[] = {
      {Model(3000, 8, 60, 600), 300}, {Model(100, 8, 30, 300), 250}, {Model(20, 16, 20, 900), 70}};
  for (const auto& c : cases) {
    CAPTURE(c.interval);
    const RunEstimate run = EstimateRun(1000, Seconds(100), c.interval, c.model);
    double sum = 0, squares = 0;
    constexpr int kRuns = 4000;
    for (int i = 0; i < kRuns; ++i) {
      const double time = RunOnce(1000, 100, c.interval, c.model, random);
      sum += time;
      squares += time * time;
    }
    const double mean = sum / kRuns;
    const double error = std::sqrt((squares / kRuns - mean * mean) / kRuns);
    CHECK(std::abs(run.expected.value - mean) < 4 * error);
    CHECK(run.work.value == doctest::Approx(100'000));
    CHECK(run.expected.value == doctest::Approx((run.work + run.checkpointing + run.lost).value));
    CHECK(run.Goodput() == doctest::Approx(100'000 / run.expected.value));
  }
}

TEST_CASE("EstimateRun: the renewal formula by hand") {
  // M = 3600 s, t + c = 360, r = 0: E = 3600 (e^0.1 - 1) = 378.6153 per stretch, ten of them.
  const RunEstimate run = EstimateRun(100, Seconds(35), 10, Model(1, 1, 10, 0));
  CHECK(run.expected.value == doctest::Approx(3786.153));
  CHECK(run.checkpoints == 10);
  CHECK(run.expected_failures == doctest::Approx(1.051709));
  // With a restart of 720 s every stretch takes e^0.2 times as long.
  const RunEstimate slow = EstimateRun(100, Seconds(35), 10, Model(1, 1, 10, 720));
  CHECK(slow.expected.value == doctest::Approx(3786.153 * 1.2214028));
  // Without failures in sight: work and checkpoints.
  const RunEstimate calm = EstimateRun(105, Seconds(35), 10, Model(1e12, 1, 10, 720));
  CHECK(calm.expected.value == doctest::Approx(105 * 35 + 11 * 10));
}

TEST_CASE("BestInterval: least expected time, near Young's and Daly's where those hold") {
  for (const double checkpoint : {0.001, 1.0, 60.0, 600.0, 20000.0}) {
    CAPTURE(checkpoint);
    const FailureModel model = Model(5, 1, checkpoint, 300);
    const double mtbf = 18000;
    const double best = BestInterval(model).value;
    const auto cost = [&](double t) {
      return ExpectedStretch(Seconds(t + checkpoint), model).value / t;
    };
    // Nothing around it is better.
    for (const double factor : {0.5, 0.9, 0.99, 1.01, 1.1, 2.0}) {
      CHECK(cost(best) <= cost(best * factor));
    }
    const double young = std::sqrt(2 * checkpoint * mtbf);
    const double half = checkpoint / (2 * mtbf);
    const double daly = young * (1 + std::sqrt(half) / 3 + half / 9) - checkpoint;
    CHECK(best < young);
    if (checkpoint < mtbf / 10) {
      CHECK(best == doctest::Approx(daly).epsilon(0.001));
    }
  }
  CHECK(BestInterval(Model(5, 1, 0, 300)).value == 0);
}

TEST_CASE("EstimateRun: the interval it chooses is the best one") {
  for (const double checkpoint : {0.0, 5.0, 120.0}) {
    const FailureModel model = Model(50, 32, checkpoint, 600);
    const RunEstimate chosen = EstimateRun(2000, Seconds(30), 0, model);
    for (std::int64_t interval = 1; interval <= 2000; ++interval) {
      const RunEstimate other = EstimateRun(2000, Seconds(30), interval, model);
      // Up to what a last stretch cut short saves.
      CHECK(chosen.expected.value <= other.expected.value * 1.001);
    }
  }
  CHECK(EstimateRun(2000, Seconds(30), 0, Model(50, 32, 0, 600)).interval_steps == 1);
  CHECK(EstimateRun(20, Seconds(30), 0, Model(1e9, 1, 60, 600)).interval_steps == 20);
}

}  // namespace
}  // namespace shardwright
