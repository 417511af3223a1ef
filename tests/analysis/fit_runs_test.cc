// Fitting finds numbers again that made the "measurements".

#include "analysis/fit_runs.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "analysis/profile_numbers.h"
#include "core/error.h"
#include "schedule/lower.h"
#include "simulator/simulate.h"
#include "tests/analysis/made_runs.h"

namespace shardwright {
namespace {

// Runs measured by a machine of our own making: the base profile with a few numbers changed.
std::vector<MeasuredRun> SyntheticRuns(double gemm, double elementwise, double attention,
                                       const std::string& gpu = "a100-40") {
  std::vector<MeasuredRun> runs;
  for (const auto& [layers, hidden] : {std::pair(12, 768), std::pair(24, 1024)}) {
    for (const auto& [micro_batch, sequence] :
         {std::pair(1, 2048), std::pair(4, 2048), std::pair(8, 2048), std::pair(2, 4096),
          std::pair(1, 8192)}) {
      MeasuredRun run = testing::MakeRun({layers, hidden, micro_batch, sequence, gpu});
      const PlanFile& plan = run.plan;
      Profile truth = DefaultProfile(plan.cluster.gpu, "");
      *NumberAt(truth, "compute.gemm.bf16", "test").value = gemm;
      *NumberAt(truth, "compute.elementwise", "test").value = elementwise;
      *NumberAt(truth, "compute.triton_attention_backward", "test").value = attention;
      const Program program = Lower(
          {.model = plan.model.model, .kernels = plan.kernels, .job = plan.job, .plan = plan.plan});
      SimulateOptions options;
      options.reserved = false;
      run.step_time_s = ToSeconds(Simulate({.program = program,
                                            .cluster = plan.cluster,
                                            .profile = truth,
                                            .options = options})
                                      .step_time)
                            .value;
      runs.push_back(std::move(run));
    }
  }
  return runs;
}

TEST_CASE("FitRuns: known numbers are found again") {
  const std::vector<MeasuredRun> runs = SyntheticRuns(0.55, 0.5, 0.3);
  REQUIRE(runs.size() >= 8);
  FitOptions options;
  // No row multiplies fp16: it stays as far from bf16 as the base profile has it.
  options.numbers = {"compute.gemm.bf16", "compute.elementwise",
                     "compute.triton_attention_backward", "compute.gemm.fp16"};
  options.leave_out = FoldKind::kNone;
  const RunFit fit = FitRuns(runs, options);
  REQUIRE(fit.stacks.size() == 1);
  CHECK(fit.stacks[0].rows == runs.size());
  CHECK(fit.stacks[0].sources == std::set<std::string>{"made"});
  const std::vector<FittedNumber>& numbers = fit.stacks[0].numbers;
  const double fp16 = numbers[3].start * numbers[0].value / numbers[0].start;
  // The mild pull towards what is expected costs about a percent.
  constexpr double kPull = 0.02;
  CHECK(std::abs(numbers[0].value / 0.55 - 1) < kPull);
  CHECK(std::abs(numbers[1].value / 0.5 - 1) < kPull);
  CHECK(std::abs(numbers[2].value / 0.3 - 1) < kPull);
  CHECK(std::abs(numbers[3].value / fp16 - 1) < 0.002);
  CHECK(fit.stacks[0].errors.max < 0.01);
}

TEST_CASE("FitRuns: GPU types with one chip share all numbers but those of each stack") {
  std::vector<MeasuredRun> runs = SyntheticRuns(0.55, 0.5, 0.3);
  for (const MeasuredRun& run : SyntheticRuns(0.65, 0.6, 0.3, "a100-80")) {
    runs.push_back(run);
  }
  FitOptions options;
  options.numbers = {"compute.gemm.bf16", "compute.elementwise",
                     "compute.triton_attention_backward", "compute.gemm.fp16"};
  options.leave_out = FoldKind::kNone;
  const RunFit fit = FitRuns(runs, options);
  REQUIRE(fit.stacks.size() == 2);
  for (const FittedStack& stack : fit.stacks) {
    CAPTURE(stack.gpu);
    REQUIRE(stack.numbers.size() == 4);
    constexpr double kPull = 0.02;
    const bool is_small = stack.gpu == "a100-40";
    CHECK(std::abs(stack.numbers[0].value / (is_small ? 0.55 : 0.65) - 1) < kPull);
    CHECK(std::abs(stack.numbers[1].value / (is_small ? 0.5 : 0.6) - 1) < kPull);
    CHECK(stack.numbers[2].value == fit.stacks[0].numbers[2].value);
    CHECK(std::abs(stack.numbers[2].value / 0.3 - 1) < kPull);
    // Of a further dtype the ratio is shared: slower products are slower in both.
    const FittedNumber& bf16 = stack.numbers[0];
    const FittedNumber& fp16 = stack.numbers[3];
    CHECK(std::abs(fp16.value / fp16.start / (bf16.value / bf16.start) - 1) < 0.002);
  }
}

// The rows of a model decide nothing about how it is predicted while it is left out.
TEST_CASE("FitRuns: what is left out is not seen") {
  std::vector<MeasuredRun> runs = SyntheticRuns(0.55, 0.5, 0.3);
  FitOptions options;
  options.numbers = {"compute.gemm.bf16", "compute.elementwise"};
  const std::string model = runs[0].model;
  const auto predicted = [&] {
    const RunFit fit = FitRuns(runs, options);
    std::vector<double> times;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      if (runs[i].model == model) {
        times.push_back((1 + fit.left_out_rows[i].error) * runs[i].step_time_s);
      }
    }
    return times;
  };
  const std::vector<double> before = predicted();
  for (MeasuredRun& run : runs) {
    run.step_time_s *= run.model == model ? 2 : 1;
  }
  const std::vector<double> after = predicted();
  REQUIRE(before.size() < runs.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    CHECK(after[i] == doctest::Approx(before[i]).epsilon(1e-9));
  }
}

// Two sources on one chip, of which the second has one model.
std::vector<MeasuredRun> TwoSources() {
  std::vector<MeasuredRun> runs = SyntheticRuns(0.55, 0.5, 0.3);
  const std::string model = runs[0].model;
  for (MeasuredRun& run : runs) {
    run.source = run.model == model && run.plan.plan.micro_batch > 2 ? "second" : "first";
  }
  return runs;
}

TEST_CASE("FitRuns: sources and models of a source are left out") {
  const std::vector<MeasuredRun> runs = TwoSources();
  FitOptions options;
  options.numbers = {"compute.gemm.bf16", "compute.elementwise"};
  options.leave_out = FoldKind::kSource;
  const RunFit by_source = FitRuns(runs, options);
  REQUIRE(by_source.left_out.size() == 2);
  CHECK(by_source.left_out[0].model == "first");
  CHECK(by_source.left_out[1].model == "second");
  CHECK(by_source.left_out_rows.size() == runs.size());
  CHECK(by_source.left_out[0].errors.count + by_source.left_out[1].errors.count == runs.size());

  options.leave_out = FoldKind::kSize;
  const RunFit by_size = FitRuns(runs, options);
  const auto of_first = static_cast<std::size_t>(std::count_if(
      runs.begin(), runs.end(), [](const MeasuredRun& run) { return run.source == "first"; }));
  REQUIRE(of_first < runs.size());
  CHECK(by_size.left_out_rows.size() == of_first);
  for (const LeftOutModel& fold : by_size.left_out) {
    CHECK(fold.model.starts_with("first, "));
  }
}

TEST_CASE("FitRuns: what a source measured does not move how it is predicted while left out") {
  std::vector<MeasuredRun> runs = TwoSources();
  FitOptions options;
  options.numbers = {"compute.gemm.bf16", "compute.elementwise"};
  options.leave_out = FoldKind::kSource;
  const auto predicted = [&] {
    const RunFit fit = FitRuns(runs, options);
    std::vector<double> times;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      if (runs[i].source == "second") {
        times.push_back((1 + fit.left_out_rows[i].error) * runs[i].step_time_s);
      }
    }
    return times;
  };
  const std::vector<double> before = predicted();
  for (MeasuredRun& run : runs) {
    run.step_time_s *= run.source == "second" ? 2 : 1;
  }
  const std::vector<double> after = predicted();
  REQUIRE(!before.empty());
  for (std::size_t i = 0; i < before.size(); ++i) {
    CHECK(after[i] == doctest::Approx(before[i]).epsilon(1e-9));
  }
}

TEST_CASE("FitRuns: too few rows and unknown numbers") {
  const std::vector<MeasuredRun> runs = SyntheticRuns(0.55, 0.5, 0.3);
  CHECK_THROWS_WITH_AS((void)FitRuns({runs[0]}, {}),
                       "table: got no chip and framework with 4 rows that have a step time, "
                       "expected more rows",
                       InputError);
  FitOptions options;
  options.numbers = {"compute.gem.bf16"};
  CHECK_THROWS_WITH_AS((void)FitRuns(runs, options),
                       "--numbers: got \"compute.gem.bf16\", expected a number of a profile such "
                       "as \"compute.gemm.bf16\"; did you mean \"compute.gemm.bf16\"?",
                       InputError);
}

TEST_CASE("FitRuns: a fitted profile reads back") {
  FittedStack stack;
  stack.gpu = "a100-80";
  stack.kernel_set = "composer-2024";
  stack.base = "a100-torch-eager";
  stack.rows = 12;
  stack.rows_of = {{"composer-2023", 5}, {"composer-2024", 7}};
  stack.sources = {"llmfoundry"};
  stack.spread = 0.05;
  stack.left_out_error = 0.03216;
  stack.numbers = {{"compute.gemm.bf16", 0.71234, 0.3, 0.95, 0.7, true, false},
                   {"host.step", 0.005731, 1e-4, 0.1, 5e-3, false, true}};
  const std::string text = FittedProfileJson(stack, "a test", "2026-11-21");
  CHECK(text.find("\"5.73 ms\"") != std::string::npos);
  CHECK(text.find(R"(  "fit": {
    "gpu": "a100-80",
    "runs": {
      "composer-2023": 5,
      "composer-2024": 7
    },
    "sources": [
      "llmfoundry"
    ],
    "left_out_error": 0.0322
  },)") != std::string::npos);
  const Profile profile = ParseProfile(text, "fitted.json");
  CHECK(profile.name == "a100-80-composer-2024");
  CHECK(profile.kernel_set == "composer-2024");
  REQUIRE(profile.compute.gemm[static_cast<std::size_t>(MathType::kBf16)].has_value());
  const Number<double>& gemm = *profile.compute.gemm[static_cast<std::size_t>(MathType::kBf16)];
  CHECK(gemm.value == 0.712);  // three digits
  CHECK(gemm.spread == 0.05);
  CHECK(gemm.origin.kind == NumberKind::kFitted);
  CHECK(profile.host.step.value.value == doctest::Approx(0.00573));
}

}  // namespace
}  // namespace shardwright
