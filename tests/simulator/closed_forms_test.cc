// Lowered programs of equal units against the closed forms of docs/lowering.md: the forward time
// and backward period of FSDP2, and FSDP1's rate limiter. Durations are drawn at random; the
// expected values are the formulas, not our own output.

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "simulator/engine.h"
#include "tests/schedule/chain_model.h"
#include "tests/simulator/run_chain.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its run

TEST_CASE("FSDP2: forward time and backward period of equal units") {
  const unsigned seed = 20261121;
  std::mt19937 random(seed);
  CAPTURE(seed);
  std::uniform_int_distribution<std::int64_t> duration(1, 1000);
  for (int trial = 0; trial < 300; ++trial) {
    ChainSpec spec;
    spec.blocks = 40;
    const Durations d{duration(random), duration(random), duration(random),
                      duration(random), duration(random), duration(random)};
    CAPTURE(trial);
    const Run run = RunChain(spec, ChainPlan(spec, Dialect::kFsdp2, 4), d);
    const std::int64_t forward =
        run.End(Block(spec.blocks - 1, "lin0.fwd")) - run.Start(Block(0, "fwd.all_gather"));
    CHECK(forward == d.gather + d.copy_out + d.forward +
                         (spec.blocks - 1) * std::max(d.gather, d.copy_out + d.forward));
    // The period between the ends of successive backward ops, once the start-up has died out.
    const std::int64_t period = std::max({d.copy_out + d.backward + d.copy_in, d.reduce + d.gather,
                                          d.reduce + d.copy_in, d.copy_out + d.gather});
    CHECK(run.End(Block(8, "lin0.bwd")) - run.End(Block(28, "lin0.bwd")) == 20 * period);
  }
}

// Gathered units between the issue of their gather and the end of their forward, at most at once.
int MostUnitsAlive(const Run& run, int blocks) {
  std::vector<std::pair<std::int64_t, int>> events;
  for (int i = 0; i < blocks; ++i) {
    events.emplace_back(run.spans.at(Block(i, "fwd.all_gather")).issued.value, +1);
    events.emplace_back(run.End(Block(i, "lin0.fwd")), -1);
  }
  std::sort(events.begin(), events.end());  // an end at the same instant comes first
  int alive = 0, most = 0;
  for (const auto& [time, change] : events) {
    alive += change;
    most = std::max(most, alive);
  }
  return most;
}

TEST_CASE("FSDP1: the limiter keeps two units alive, without it all pile up") {
  ChainSpec spec;
  spec.blocks = 12;
  const Durations slow_compute{10, 0, 1000, 2000, 0, 10};
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 4);
  // A gather is not issued before the compute of the unit two before it has ended: the unit that
  // computes and the new one.
  CHECK(MostUnitsAlive(RunChain(spec, plan, slow_compute), spec.blocks) == 2);
  plan.limit_all_gathers = false;
  CHECK(MostUnitsAlive(RunChain(spec, plan, slow_compute), spec.blocks) == spec.blocks);
}

TEST_CASE("FSDP1: what each prefetch mode hides in backward") {
  // Gather g, backward b, reduce r with g + r < b: PRE hides both under compute, so the period is
  // b; without prefetch the gather queues behind the reduction, which waits for compute: b + r + g.
  ChainSpec spec;
  spec.blocks = 24;
  const Durations d{100, 0, 1000, 2000, 0, 300};
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 4);
  const auto period = [&](BackwardPrefetch mode) {
    plan.backward_prefetch = mode;
    const Run run = RunChain(spec, plan, d);
    return (run.End(Block(4, "lin0.bwd")) - run.End(Block(14, "lin0.bwd"))) / 10;
  };
  CHECK(period(BackwardPrefetch::kPre) == 2000);
  CHECK(period(BackwardPrefetch::kNone) == 2000 + 300 + 100);
}

}  // namespace
}  // namespace shardwright
