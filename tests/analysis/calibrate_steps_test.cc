// One step time moves the numbers that it can tell something about, and no more than it tells.

#include "analysis/calibrate_steps.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "analysis/confidence.h"
#include "analysis/predict_run.h"
#include "analysis/profile_numbers.h"
#include "core/error.h"
#include "tests/analysis/made_runs.h"

namespace shardwright {
namespace {

const Origin kOrigin{NumberKind::kFitted, "a test", "2026-11-28"};

MeasuredRun OneRun(const std::string& gpu = "a100-40") {
  MeasuredRun run = testing::MakeRun(
      {.layers = 24, .hidden = 2048, .micro_batch = 4, .sequence = 2048, .gpu = gpu});
  run.id = "one";
  return run;
}

// The run's plan by another profile.
PlanFile By(const MeasuredRun& run, const Profile& profile) {
  PlanFile plan = run.plan;
  plan.profile = profile;
  return plan;
}

// A profile of the user's, so that bands come from its numbers alone: products uncertain by
// `spread`, everything else exact.
Profile OneNumber(double spread) {
  Profile profile = LoadProfile("a100-torch-eager");
  profile.name = "mine";
  for (const std::string& path : NumberPaths(profile)) {
    *NumberAt(profile, path, "test").spread = path == "compute.gemm.bf16" ? spread : 0;
  }
  return profile;
}

double Predicted(const MeasuredRun& run, const Profile& profile) {
  return PredictRun(By(run, profile)).step_time.value;
}

double Gemm(Profile profile) {
  return *NumberAt(profile, "compute.gemm.bf16", "test").value;
}

TEST_CASE("CalibrateSteps: one uncertain number takes what the step says, less the noise") {
  MeasuredRun run = OneRun();
  const Profile start = OneNumber(0.3);
  Profile truth = start;
  *NumberAt(truth, "compute.gemm.bf16", "test").value = 0.65;
  run.step_time_s = Predicted(run, truth);
  const CalibrationResult result = CalibrateSteps({run}, start, kOrigin);

  // With variance P of the step by the number and n^2 of the noise, P / (P + n^2) of the way, in
  // logarithms; what the slope changes on the way is less than the tolerance.
  const double band = StepTimeBand(By(run, start));
  const double variance = std::pow(band / 1.6449, 2);
  const double part = variance / (variance + kStepNoise * kStepNoise);
  REQUIRE(part > 0.8);
  const double error = std::log(Predicted(run, start) / run.step_time_s);
  const double left = std::log(Predicted(run, result.profile) / run.step_time_s);
  CHECK(left / error == doctest::Approx(1 - part).epsilon(0.2));
  CHECK(Gemm(result.profile) == doctest::Approx(0.65).epsilon(0.05));
  REQUIRE(result.numbers.size() == 1);
  CHECK(result.numbers[0].field == "compute.gemm.bf16");
  CHECK(result.numbers[0].before == 0.782);
  REQUIRE(result.runs.size() == 1);
  CHECK(result.runs[0].measured.value == run.step_time_s);
  CHECK(result.runs[0].after.value ==
        doctest::Approx(Predicted(run, result.profile)).epsilon(1e-3));

  // What is left to doubt: the noise twice, of the row that was seen and of the next one.
  const double doubt = 1.6449 * std::sqrt(variance * (1 - part) + kStepNoise * kStepNoise);
  CHECK(StepTimeBand(By(run, result.profile)) == doctest::Approx(doubt).epsilon(0.1));
}

TEST_CASE("CalibrateSteps: a number without a spread stays, a fraction stays below 1") {
  MeasuredRun run = OneRun();
  const Profile start = OneNumber(0.3);
  run.step_time_s = Predicted(run, start) / 3;  // no products are as fast
  const CalibrationResult result = CalibrateSteps({run}, start, kOrigin);
  CHECK(Gemm(result.profile) == 1);
  CHECK(result.profile.compute.elementwise == start.compute.elementwise);

  run.step_time_s = Predicted(run, start);
  const CalibrationResult same = CalibrateSteps({run}, start, kOrigin);
  CHECK(same.numbers.empty());
  CHECK(Gemm(same.profile) == Gemm(start));
}

TEST_CASE("CalibrateSteps: two rows know more than one") {
  MeasuredRun run = OneRun();
  const Profile start = OneNumber(0.05);
  const double expected = Predicted(run, start);
  run.step_time_s = 1.1 * expected;
  MeasuredRun again = run;
  again.id = "again";
  const auto left = [&](const std::vector<MeasuredRun>& runs) {
    return Predicted(run, CalibrateSteps(runs, start, kOrigin).profile) / run.step_time_s - 1;
  };
  const double one = left({run});
  const double two = left({run, again});
  CHECK(one < two);
  CHECK(two < 0);
}

TEST_CASE("CalibrateSteps: rows of two GPUs, and rows without a time") {
  const Profile start = LoadProfile("a100-torch-eager");
  MeasuredRun run = OneRun();
  MeasuredRun other = OneRun("h100-80");
  run.step_time_s = other.step_time_s = 1;
  CHECK_THROWS_AS((void)CalibrateSteps({run, other}, start, kOrigin), InputError);
  run.step_time_s = 0;
  CHECK_THROWS_WITH_AS((void)CalibrateSteps({run}, start, kOrigin),
                       "one: got no step_time_s, expected seconds per step", InputError);
}

}  // namespace
}  // namespace shardwright
