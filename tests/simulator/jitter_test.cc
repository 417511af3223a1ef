// Sampled step times against the engine (no noise), the all-ranks simulation (slow ranks) and
// expected maxima of normal deviates (noise).

#include "simulator/jitter.h"

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/builder.h"
#include "simulator/engine.h"
#include "tests/simulator/all_ranks.h"
#include "tests/simulator/random_program.h"

namespace shardwright {
namespace {

// The spans of the last simulated step.
std::vector<Span> SteadySpans(const std::vector<Span>& spans, int steps) {
  std::vector<Span> steady;
  for (const Span& span : spans) {
    if (span.body == BodyKind::kStep && span.step == static_cast<std::uint32_t>(steps - 1)) {
      steady.push_back(span);
    }
  }
  return steady;
}

struct Alone {
  EngineResult result;
  std::vector<Span> steady;
};

Alone RunAlone(const Program& program, const PriceTable& prices, bool contention) {
  EngineWorkspace workspace;
  EngineOptions options;
  options.contention = contention;
  std::vector<Span> spans;
  Alone alone;
  alone.result = RunEngineWithSpans(program, prices, options, workspace, spans);
  alone.steady = SteadySpans(spans, alone.result.steps);
  return alone;
}

TEST_CASE("SampleSteps: without noise every step is the engine's steady step") {
  int compared = 0;
  for (const bool contention : {false, true}) {
    for (std::uint64_t seed = 1; seed <= 100; ++seed) {
      CAPTURE(seed);
      CAPTURE(contention);
      const RandomProgram random = MakeRandomProgram(seed, {3, 2, 5, contention});
      const Alone alone = RunAlone(random.program, random.prices, contention);
      // With contention a step may recur only within rounding, and host waits shift what overlaps.
      if (!alone.result.is_steady || alone.steady.empty()) {
        continue;
      }
      const StepDistribution steps = SampleSteps(random.program, random.prices, alone.steady,
                                                 {.ranks = 16, .slow_ranks = {}, .samples = 12});
      const double expected = static_cast<double>(alone.result.steady.time.value);
      const double tolerance = contention ? 1e-6 * expected + 100 : 0;
      CHECK(std::abs(static_cast<double>(steps.nominal.value) - expected) <= tolerance);
      // Steps may alternate around it, depending on how they began.
      CHECK(std::abs(static_cast<double>(steps.mean.value) - expected) <= tolerance);
      CHECK(steps.waiting == SimTime(0));
      ++compared;
    }
  }
  CHECK(compared > 100);
}

TEST_CASE("SampleSteps: slow ranks as in the simulation of all ranks") {
  int compared = 0;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {3, 2, 5, false});
    const Alone alone = RunAlone(random.program, random.prices, false);
    std::vector<RankProgram> ranks(16, {&random.program, &random.prices, 1});
    ranks[3].slowdown = 1.75;
    ranks[12].slowdown = 1.25;
    AllRanksOptions options;
    options.contention = false;
    options.steps = 9;
    const std::vector<SimTime> all = RunAllRanks(ranks, options).step_times;
    if (alone.steady.empty() || !(all[8] == all[7] && all[7] == all[6])) {
      continue;  // ranks that share no group drift apart for ever
    }
    const StepDistribution steps =
        SampleSteps(random.program, random.prices, alone.steady,
                    {.ranks = 16, .slow_ranks = {{12, 1.25}, {3, 1.75}}, .samples = 5});
    CHECK(steps.sorted[4] == all[8]);
    CHECK(steps.followed == 16);
    ++compared;
  }
  CHECK(compared > 30);
}

// `ops` compute ops of 1 us one after the other, then an all-reduce of all ranks, 300 ns, behind
// which the next step begins.
struct Chain {
  Program program;
  PriceTable prices;
  Alone alone;
};

Chain MakeChain(std::int64_t ranks, int ops = 1) {
  Chain chain;
  chain.program.groups = {{"world", ranks, 1}};
  ShapeInterner interner(chain.program);
  OpShape compute;
  OpShape reduce;
  reduce.code = OpCode::kAllReduce;
  reduce.stream = Stream::kReplicate;
  reduce.group = GroupId(0);
  const ShapeId compute_id = interner.Intern(compute);
  const ShapeId reduce_id = interner.Intern(reduce);
  BodyBuilder init(chain.program, chain.program.init);
  init.Finish();
  BodyBuilder step(chain.program, chain.program.step);
  OpId work;
  for (int i = 0; i < ops; ++i) {
    work = step.Add({compute_id});
    if (i == 0) {
      step.AfterSlot(0);
    }
  }
  const OpId sync = step.Add({reduce_id});
  step.After(work);
  step.SetCarry(0, sync);
  step.Finish();
  chain.prices.prices.resize(2);
  chain.prices.prices[compute_id.value].duration = SimTime(1'000'000);
  chain.prices.prices[reduce_id.value].duration = SimTime(300'000);
  chain.alone = RunAlone(chain.program, chain.prices, false);
  return chain;
}

StepDistribution Sample(const Chain& chain, const JitterOptions& options) {
  return SampleSteps(chain.program, chain.prices, chain.alone.steady, options);
}

TEST_CASE("A slow rank by factor f delays every step by exactly f") {
  for (const std::int64_t ranks : {1, 4, 64, 4096}) {
    CAPTURE(ranks);
    const Chain chain = MakeChain(ranks);
    const StepDistribution steps =
        Sample(chain, {.ranks = ranks, .slow_ranks = {{ranks - 1, 1.5}}, .samples = 4});
    CHECK(steps.nominal == SimTime(1'300'000));
    CHECK(steps.sorted == std::vector<SimTime>(4, SimTime(1'800'000)));
    CHECK(steps.mean == SimTime(1'800'000));
    CHECK(steps.deviation == SimTime(0));
    // All followed ranks but one wait half a microsecond.
    const double waiters = static_cast<double>(steps.followed - 1);
    CHECK(static_cast<double>(steps.waiting.value) ==
          doctest::Approx(500'000.0 * waiters / static_cast<double>(steps.followed)).epsilon(1e-5));
  }
}

// Expected largest of n standard normal deviates: Harter, Biometrika 48 (1961), table 1.
TEST_CASE("Noise: a synchronous step waits for the largest of the ranks' deviates") {
  const struct {
    std::int64_t ranks;
    double largest;
  } rows[] = {{1, 0.0}, {2, 0.56419}, {10, 1.53875}, {100, 2.50759}, {400, 2.96818}};
  constexpr double kSigma = 0.05;
  constexpr int kSamples = 4000;
  for (const auto& row : rows) {
    CAPTURE(row.ranks);
    const Chain chain = MakeChain(row.ranks);
    const double expected = 1'300'000 + 1'000'000 * kSigma * row.largest;
    // The largest of n varies less than one deviate, so its mean is known to sigma / sqrt(samples).
    const double error = 1'000'000 * kSigma / std::sqrt(static_cast<double>(kSamples));
    const StepDistribution ops = Sample(
        chain, {.ranks = row.ranks, .op_sigma = kSigma, .slow_ranks = {}, .samples = kSamples});
    CHECK(std::abs(static_cast<double>(ops.mean.value) - expected) < 4 * error);
    const StepDistribution ranks = Sample(
        chain, {.ranks = row.ranks, .rank_sigma = kSigma, .slow_ranks = {}, .samples = kSamples});
    CHECK(std::abs(static_cast<double>(ranks.mean.value) - expected) < 4 * error);
  }
}

TEST_CASE("Noise of ops averages out within a rank, noise of ranks does not") {
  // Nine ops: 9 us, deviation sqrt(9) x 50 ns of one step of one rank, against 9 x 50 ns.
  const Chain chain = MakeChain(1, 9);
  const auto deviation = [&](double op_sigma, double rank_sigma) {
    const StepDistribution steps = Sample(chain, {.ranks = 1,
                                                  .op_sigma = op_sigma,
                                                  .rank_sigma = rank_sigma,
                                                  .slow_ranks = {},
                                                  .samples = 4000});
    return static_cast<double>(steps.deviation.value);
  };
  CHECK(deviation(0.05, 0) == doctest::Approx(150'000).epsilon(0.05));
  CHECK(deviation(0, 0.05) == doctest::Approx(450'000).epsilon(0.05));
}

TEST_CASE(
    "Percentiles: of one rank, those of the normal distribution; equal seeds, equal samples") {
  const Chain chain = MakeChain(1);
  const JitterOptions options = {
      .ranks = 1, .op_sigma = 0.05, .slow_ranks = {}, .samples = 8000, .seed = 7};
  const StepDistribution steps = Sample(chain, options);
  const auto z = [&](double q) {
    return (static_cast<double>(steps.Percentile(q).value) - 1'300'000) / 50'000;
  };
  // Standard normal quantiles; the error of a sample quantile is about sqrt(q(1-q)/n)/density.
  CHECK(std::abs(z(0.5)) < 0.06);
  CHECK(std::abs(z(0.9) - 1.2816) < 0.08);
  CHECK(std::abs(z(0.99) - 2.3263) < 0.17);
  CHECK(steps.Percentile(1) == steps.sorted.back());
  CHECK(Sample(chain, options).sorted == steps.sorted);
  JitterOptions other = options;
  other.seed = 8;
  CHECK_FALSE(Sample(chain, other).sorted == steps.sorted);
  // Table values of the normal distribution.
  CHECK(NormalUpperQuantile(0.5) == doctest::Approx(0.0));
  CHECK(NormalUpperQuantile(0.025) == doctest::Approx(1.959964));
  CHECK(NormalUpperQuantile(1e-9) == doctest::Approx(5.997807));
}

TEST_CASE("A slow rank outside of the job is refused") {
  const Chain chain = MakeChain(4);
  CHECK_THROWS_WITH_AS((void)Sample(chain, {.ranks = 4, .slow_ranks = {{4, 2.0}}}),
                       "slow rank: got 4, expected a rank from 0 to 3", InputError);
}

}  // namespace
}  // namespace shardwright
