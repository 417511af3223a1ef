// Lowered programs of equal units under ZeRO against closed forms, which follow from
// who waits for whom; durations are drawn at random. See docs/lowering.md.

#include <algorithm>
#include <cstdint>
#include <random>

#include <doctest/doctest.h>

#include "schedule/wrap.h"
#include "tests/simulator/run_chain.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its run

constexpr int kBlocks = 40;

Durations DrawDurations(std::mt19937& random) {
  std::uniform_int_distribution<std::int64_t> duration(1, 1000);
  Durations d;
  d.gather = duration(random);
  d.forward = duration(random);
  d.backward = duration(random);
  d.reduce = duration(random);
  return d;
}

ChainSpec Spec() {
  ChainSpec spec;
  spec.blocks = kBlocks;
  return spec;
}

Plan ZeroPlan(Dialect dialect) {
  Plan plan;
  plan.dialect = dialect;
  plan.shard_size = 4;
  plan.units =
      Wrap(ChainModel(Spec()), ParseWrap(DefaultWrap(dialect), "test"), {}, dialect, "test");
  plan.zero.reduce_bucket = Spec().width * Spec().width;
  return plan;
}

// Time per block between the ends of two backward ops far from both ends.
double Period(const Run& run, const std::string& op) {
  return static_cast<double>(run.End(Block(8, op)) - run.End(Block(32, op))) / 24.0;
}

// Gathers wait for the gather before, never for compute: the host issues them at once.
std::int64_t ForwardTime(const Run& run, const std::string& gather) {
  return run.End(Block(kBlocks - 1, "lin0.fwd")) - run.Start(Block(0, gather));
}

TEST_CASE("ZeRO-3: forward, and backward with one communicator for gathers and reductions") {
  // RS(i+1) is issued when block i's gradient would overflow the bucket, before AG(i-1): the
  // communicator runs one gather and one reduction per block, compute one backward.
  std::mt19937 random(31);
  for (int trial = 0; trial < 100; ++trial) {
    const Durations d = DrawDurations(random);
    CAPTURE(trial);
    Plan plan = ZeroPlan(Dialect::kZero3);
    plan.zero.persistence_threshold = 0;
    plan.zero.prefetch_bucket = 0;
    plan.zero.max_reuse_distance = 0;
    const Run run = RunChain(Spec(), plan, d);
    CHECK(ForwardTime(run, "lin0.fwd.all_gather") ==
          d.gather + d.forward + (kBlocks - 1) * std::max(d.gather, d.forward));
    CHECK(Period(run, "lin0.bwd") ==
          static_cast<double>(std::max(d.backward, d.reduce + d.gather)));
    // Everything is still there in backward: only reductions are left. The host waits, before it
    // issues the reduction of block j + 2, for that of block j + 5 and so does block j's backward.
    plan.zero.max_reuse_distance = 1'000'000'000;
    const Run kept = RunChain(Spec(), plan, d);
    CHECK(Period(kept, "lin0.bwd.reduce_scatter") ==
          static_cast<double>(std::max(d.backward, d.reduce)));
    for (int j = 2; j < kBlocks - 6; ++j) {
      CHECK(kept.Start(Block(j, "lin0.bwd")) >= kept.End(Block(j + 5, "lin0.bwd.reduce_scatter")));
    }
  }
}

TEST_CASE("ZeRO-2: all-reduces stand between backward ops, or beside them") {
  // Buckets of two blocks. Without overlap the compute stream runs b + b + a; with it, compute
  // waits at each bucket for the one before.
  std::mt19937 random(32);
  for (int trial = 0; trial < 100; ++trial) {
    const Durations d = DrawDurations(random);
    CAPTURE(trial);
    Plan plan = ZeroPlan(Dialect::kZero2);
    plan.zero.reduce_bucket *= 2;
    CHECK(Period(RunChain(Spec(), plan, d), "lin0.bwd") ==
          static_cast<double>(2 * d.backward + d.reduce) / 2.0);
    plan.zero.overlap_comm = Overlap::kOn;
    CHECK(Period(RunChain(Spec(), plan, d), "lin0.bwd") ==
          static_cast<double>(std::max(2 * d.backward, d.reduce)) / 2.0);
  }
}

}  // namespace
}  // namespace shardwright
