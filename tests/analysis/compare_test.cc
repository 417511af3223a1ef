// Breakdowns of a trace with times set by hand, and comparisons whose answer is known because the
// "measured" trace is the same program simulated under prices that were changed on purpose.

#include "analysis/compare.h"

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "simulator/costs/pricer.h"
#include "simulator/simulate.h"
#include "tests/schedule/random_plan.h"
#include "tests/simulator/round_numbers.h"
#include "tests/traces/tiny_program.h"

namespace shardwright {
namespace {

using testing::DrawCase;
using testing::LowerCase;
using testing::RandomCase;
using testing::RoundCluster;
using testing::RoundProfile;
using testing::TinyProgram;
using testing::TinyTrace;

constexpr double kMicrosecond = 1e-6;

double WaitFor(const StepBreakdown& parts, Stream stream) {
  return parts.wait[static_cast<std::size_t>(stream)] / kMicrosecond;
}

double Run(const StepBreakdown& parts, OpClass op_class) {
  return parts.run[static_cast<std::size_t>(op_class)] / kMicrosecond;
}

// Step 1 begins at 30 us; the compute stream was last busy at 27 us. See TinyTrace.
TEST_CASE("The parts of a step add up, worked out by hand") {
  const Program program = TinyProgram("layers.0", "layers.0.linear");
  const Trace trace = TinyTrace();
  const std::vector<RecordedStep> steps = FindRecordedSteps(program, trace);
  REQUIRE(steps.size() == 4);  // two of each rank
  CHECK(steps[0].previous == RecordedStep::kNoStep);
  CHECK(steps[1].previous == 0);
  CHECK(steps[2].previous == RecordedStep::kNoStep);
  const StepBreakdown parts = BreakDown(program, trace, steps, 1);
  CHECK(parts.host_issue / kMicrosecond == doctest::Approx(5));    // 27 to 32: op 1 not issued
  CHECK(WaitFor(parts, Stream::kGather) == doctest::Approx(3));    // 32 to 35: the all-gather
  CHECK(Run(parts, OpClass::kElementwise) == doctest::Approx(7));  // 35 to 42: forward, backward
  CHECK(WaitFor(parts, Stream::kReduce) == doctest::Approx(3));    // 42 to 45: the reduce-scatter
  CHECK(Run(parts, OpClass::kOptimizer) == doctest::Approx(2));    // 45 to 47
  CHECK(parts.period / kMicrosecond == doctest::Approx(20));
  CHECK(parts.period == doctest::Approx(parts.Sum()));
}

TEST_CASE("A step whose predecessor was not recorded needs its period") {
  const Program program = TinyProgram("layers.0", "layers.0.linear");
  const Trace trace = TinyTrace();
  const std::vector<RecordedStep> steps = FindRecordedSteps(program, trace);
  // Issued at 11 us, the last compute op ends at 27 us: with a period of 20 us the step before
  // ended at 7 us.
  CHECK(BreakDown(program, trace, steps, 0, SimTime(20'000'000)).host_issue / kMicrosecond ==
        doctest::Approx(5));
  // Without one the step begins at 10 us, where its first op is issued.
  CHECK(BreakDown(program, trace, steps, 0).host_issue / kMicrosecond == doctest::Approx(2));
}

TEST_CASE("Steps with a missing or doubled op do not count, nor match") {
  const Program program = TinyProgram("layers.0", "layers.0.linear");
  Trace trace = TinyTrace();
  trace.spans.erase(trace.spans.begin() + 3);  // op 2 of step 0 on rank 0
  CHECK(FindRecordedSteps(program, trace).size() == 3);
  trace = TinyTrace();
  trace.spans.insert(trace.spans.begin() + 3, trace.spans[3]);
  CHECK(FindRecordedSteps(program, trace).size() == 3);
}

struct Simulated {
  SimulationResult result;
  PriceTable prices;
};

// Every price of the class times `factor`; `issue` scales what the host pays.
PriceTable Changed(const Program& program, PriceTable prices, OpClass op_class, int factor,
                   int issue) {
  for (std::size_t i = 0; i < prices.prices.size(); ++i) {
    Price& price = prices.prices[i];
    if (ClassOf(program, program.shapes[i]) == op_class) {
      price.duration = price.duration * factor;
      price.tail = price.tail * factor;
    }
    price.issue = price.issue * issue;
    price.first_launch = price.first_launch * issue;
  }
  return prices;
}

Trace RunWith(const Program& program, const PriceTable& prices) {
  EngineOptions options;
  options.contention = false;
  EngineWorkspace workspace;
  Trace trace;
  (void)RunEngineWithSpans(program, prices, options, workspace, trace.spans);
  return trace;
}

SimTime PeriodWith(const Program& program, const PriceTable& prices) {
  EngineOptions options;
  options.contention = false;
  EngineWorkspace workspace;
  return RunEngine(program, prices, options, workspace).steady.time;
}

Comparison CompareWith(const Program& program, const PriceTable& prices, const Trace& simulated,
                       const Trace& measured) {
  EngineOptions options;
  options.contention = false;
  return Compare({.program = program,
                  .simulated = simulated,
                  .simulated_period = PeriodWith(program, prices),
                  .measured = measured,
                  .prices = prices,
                  .engine = options});
}

// Plans of one node, so that RoundCluster fits them.
RandomCase DrawSmallCase(std::mt19937& random) {
  for (;;) {
    RandomCase c = DrawCase(random);
    if (c.plan.shard_size * c.plan.replicate_size <= 8) {
      return c;
    }
  }
}

Cluster ClusterOf(const RandomCase& c) {
  Cluster cluster = RoundCluster(1);
  cluster.gpus_per_node = c.plan.shard_size * c.plan.replicate_size;
  return cluster;
}

TEST_CASE("A trace equals itself") {
  const unsigned seed = 5;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 40; ++trial) {
    CAPTURE(trial);
    const RandomCase c = DrawSmallCase(random);
    CAPTURE(c.description);
    const Program program = LowerCase(c);
    const Cluster cluster = ClusterOf(c);
    const PriceTable prices = PriceProgram(program, cluster, RoundProfile());
    const Trace trace = RunWith(program, prices);
    const Comparison same = CompareWith(program, prices, trace, trace);
    CHECK(same.matched == same.spans);
    CHECK(same.spans == static_cast<std::int64_t>(trace.spans.size()));
    CHECK(same.findings.empty());
    for (const ClassComparison& row : same.classes) {
      CHECK(row.measured.value == doctest::Approx(row.simulated.value).epsilon(1e-9).scale(1e-9));
    }
    for (const Calibration& row : same.calibrations) {
      CHECK(row.factor == doctest::Approx(1).epsilon(1e-9));
      CHECK(
          row.step_time.value ==
          doctest::Approx(ToSeconds(PeriodWith(program, prices)).value).epsilon(1e-6).scale(1e-9));
    }
    double simulated = 0, measured = 0;
    for (const StepPart& part : same.parts) {
      simulated += part.simulated.value;
      measured += part.measured.value;
    }
    CHECK(simulated == doctest::Approx(same.simulated_step.value).scale(1e-9));
    CHECK(measured == doctest::Approx(same.measured_step.value).scale(1e-9));
  }
}

// A steady trace under changed prices: calibrating that class alone must give its step time.
TEST_CASE("A planted change is found and calibrated away") {
  const unsigned seed = 17;
  CAPTURE(seed);
  std::mt19937 random(seed);
  constexpr std::array<OpClass, 4> kClasses = {OpClass::kGemm, OpClass::kAllGather,
                                               OpClass::kReduceScatter, OpClass::kOptimizer};
  int found = 0;
  for (int trial = 0; trial < 60; ++trial) {
    CAPTURE(trial);
    const RandomCase c = DrawSmallCase(random);
    CAPTURE(c.description);
    const OpClass op_class = kClasses[static_cast<std::size_t>(trial) % kClasses.size()];
    const Program program = LowerCase(c);
    // Free to issue: otherwise some ops take as long as their launches, whatever their prices.
    const PriceTable prices = Changed(program, PriceProgram(program, ClusterOf(c), RoundProfile()),
                                      OpClass::kControl, 1, 0);
    const PriceTable changed = Changed(program, prices, op_class, 3, 1);
    const Comparison gap =
        CompareWith(program, prices, RunWith(program, prices), RunWith(program, changed));
    for (const Calibration& row : gap.calibrations) {
      if (row.name == NameOf(op_class)) {
        CHECK(row.factor == doctest::Approx(3).epsilon(1e-9));
        CHECK(row.step_time.value == doctest::Approx(ToSeconds(PeriodWith(program, changed)).value)
                                         .epsilon(1e-6)
                                         .scale(1e-9));
        ++found;
      } else {
        CHECK(row.factor == doctest::Approx(1).epsilon(1e-9));
      }
    }
    CHECK(gap.calibrated_step.value ==
          doctest::Approx(ToSeconds(PeriodWith(program, changed)).value).epsilon(1e-6).scale(1e-9));
  }
  CHECK(found > 30);
}

TEST_CASE("Ops that waited for cores are told, and only where the step took longer") {
  std::mt19937 random(17);
  const RandomCase c = DrawSmallCase(random);
  const Program program = LowerCase(c);
  const PriceTable prices = Changed(program, PriceProgram(program, ClusterOf(c), RoundProfile()),
                                    OpClass::kControl, 1, 0);
  const PriceTable slower = Changed(program, prices, OpClass::kGemm, 8, 1);
  const auto notes = [&](const PriceTable& measured_prices, std::int64_t part) {
    Trace measured = RunWith(program, measured_prices);
    for (Span& span : measured.spans) {
      span.cpu = SimTime((span.end - span.start).value / part);
    }
    return CompareWith(program, prices, RunWith(program, prices), measured).notes;
  };
  REQUIRE(notes(slower, 4).size() == 1);
  CHECK(notes(slower, 4)[0].starts_with("ops had a core 25 % of their time: other processes"));
  CHECK(notes(slower, 1).empty());
  CHECK(notes(prices, 4).empty());
}

TEST_CASE("Slower issue by the host is told apart from slower kernels") {
  std::mt19937 random(23);
  const RandomCase c = DrawSmallCase(random);
  const Program program = LowerCase(c);
  const PriceTable prices = PriceProgram(program, ClusterOf(c), RoundProfile());
  const PriceTable changed = Changed(program, prices, OpClass::kControl, 1, 4);
  const Comparison gap =
      CompareWith(program, prices, RunWith(program, prices), RunWith(program, changed));
  bool found = false;
  for (const Calibration& row : gap.calibrations) {
    if (row.name == "host issue") {
      CHECK(row.factor == doctest::Approx(4).epsilon(1e-9));
      found = true;
    }
  }
  CHECK(found);
}

TEST_CASE("A trace without a complete step is refused") {
  const Program program = TinyProgram("layers.0", "layers.0.linear");
  Trace short_trace = TinyTrace();
  short_trace.spans.resize(4);
  const Trace trace = TinyTrace();
  PriceTable prices;
  prices.prices.resize(program.shapes.size());
  try {
    (void)Compare({.program = program,
                   .simulated = trace,
                   .simulated_period = {},
                   .measured = short_trace,
                   .prices = prices,
                   .engine = {}});
    FAIL("no error");
  } catch (const InputError& error) {
    CHECK(std::string(error.what()) ==
          "measured trace: got no complete step, expected all ops of at least one step");
  }
}

}  // namespace
}  // namespace shardwright
