// Bounds that are computed by hand: a looser one, which no plan would contradict, fails here.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "planner/bounds.h"
#include "planner/dual.h"
#include "planner/measure.h"
#include "planner/occupancy.h"
#include "planner/search.h"
#include "planner/space.h"
#include "schedule/dialect_facts.h"
#include "schedule/plan.h"
#include "simulator/costs/collectives.h"
#include "simulator/costs/kernels.h"
#include "tests/planner/random_jobs.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

using testing::Case;
using testing::DrawCase;
using testing::NativeSearch;

// Two ranks and what they gather; kernels that leave the memory's bandwidth alone.
struct TwoRanks {
  TwoRanks() {
    std::mt19937 random(1);
    case_ = DrawCase(random, 2);
    case_.cluster = LoadCluster("h100-80 x2, nvlink 450 GB/s, host 1 TiB", 1);
    measured.classes.resize(1);
    measured.pattern_is_allowed = {true};
    terms.measured = &measured;
  }

  [[nodiscard]] double Least() const {
    OuterChoice outer;
    outer.shard_size = 2;
    Occupancy::RowWeights bytes{};
    bytes[Occupancy::kGather] = 1e9;
    const Occupancy occupancy(case_, outer, FactsOf(Dialect::kNative), bytes, {});
    return LeastTime(terms, occupancy);
  }

  Measured measured;
  Terms terms;

 private:
  Case case_;
};

// Bounds of plans of four ranks that share everything, with three micro-batches; nothing offloaded.
double BoundOf(const Case& c, Dialect dialect) {
  SearchOptions options = NativeSearch(c);
  options.base.dialect = dialect;
  options.base.moments_piece = Plan().moments_piece;
  options.effort = 0;
  for (const Candidate& candidate : Search(c, options).candidates) {
    const Plan& plan = candidate.plan;
    if (plan.shard_size == 4 && plan.accumulation == 3 && plan.sync == SyncMode::kEvery &&
        plan.offload == Offload()) {
      return candidate.bound.value;
    }
  }
  return 0;
}

Case FourRanks(const std::string& links) {
  std::mt19937 random(4);
  Case c = DrawCase(random, 4);
  c.cluster = LoadCluster("h100-80 x4, nvlink " + links + ", host 1 TiB", 1);
  c.job.global_batch = 12;
  return c;
}

}  // namespace

TEST_CASE("What is kept after forward pays for its memory") {
  // To keep all takes 2,000 bytes, to gather all again 4 s, which nothing can hide: with 500 of
  // 1,000 bytes free a quarter is kept, with all free a half.
  TwoRanks job;
  job.measured.base.seconds[0] = job.measured.forward.seconds[0] = 2;
  job.measured.classes[0].costs.resize(1);
  job.terms.seconds[Occupancy::kGather] = 10;
  job.terms.after_forward = {{2000, 0, Occupancy::kRegather, {}}, {0, 4, Occupancy::kRegather, {}}};
  job.terms.device_limit = 1000;
  job.terms.device_excess = -500;
  const double half_free = job.Least();
  job.terms.device_excess = -1000;
  CHECK(half_free - job.Least() == doctest::Approx(1).epsilon(0.01));
  CHECK(half_free >= 13);
}

TEST_CASE("Activations on the host have the room that states leave there") {
  // Of 1,000 bytes on the host states take 500. Each of four blocks copies 250 bytes, or runs for
  // 2 s more: two copy.
  TwoRanks job;
  job.measured.base.seconds[0] = 10;
  job.measured.classes[0].blocks = {0, 1, 2, 3};
  job.measured.classes[0].costs.resize(2);
  job.measured.classes[0].costs[0].copied_bytes = 250;
  job.measured.classes[0].costs[1].work.seconds[0] = 2;
  job.measured.pattern_is_allowed = {true, true};
  job.measured.all_blocks_copy = true;
  job.terms.offloads_activations = true;
  job.terms.has_host_limit = true;
  job.terms.host_limit = 1000;
  job.terms.host_excess = -500;
  job.terms.device_limit = 1000;
  job.terms.device_excess = -1000;
  CHECK(job.Least() == doctest::Approx(14).epsilon(1e-3));
}

TEST_CASE("Over slow links a step lasts as long as everything that crosses them") {
  // Nothing hides anything: gathers and reductions share the links, and compute takes no time
  // beside them. All that is gathered may stay for backward.
  const Case c = FourRanks("0.1 GB/s");
  const auto elements = static_cast<double>(CountParameters(c.model));
  const CollectivePath path = FindCollectivePath(c.cluster, c.profile, {4, 1});
  const auto seconds = [&](OpCode code, DType dtype) {
    const double bytes = elements * static_cast<double>(SizeOf(dtype));
    return CollectiveTime(code, Bytes(static_cast<std::int64_t>(bytes)), path).value;
  };
  const double expected = 3 * (seconds(OpCode::kAllGather, c.job.precision.param) +
                               seconds(OpCode::kReduceScatter, c.job.precision.reduce));
  for (const Dialect dialect : {Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1}) {
    CAPTURE(NameOf(dialect));
    const double bound = BoundOf(c, dialect);
    CHECK(bound >= expected * (1 - 1e-3));
    CHECK(bound <= expected * 1.05);
  }
}

TEST_CASE("Over fast links fsdp2's copies are all that it takes longer than fsdp1") {
  // Of what was gathered, and of gradients, each read and written once per micro-batch.
  const Case c = FourRanks("1000000 GB/s");
  const auto elements = static_cast<double>(CountParameters(c.model));
  const auto param = static_cast<double>(SizeOf(c.job.precision.param));
  const auto reduce = static_cast<double>(SizeOf(c.job.precision.reduce));
  const double bytes = 3 * elements * (param + param + std::min(param, reduce) + reduce);
  const double expected = bytes / FindKernelRates(c.cluster.gpu, c.profile.compute).copies.value;
  const double longer = BoundOf(c, Dialect::kFsdp2) - BoundOf(c, Dialect::kFsdp1);
  CHECK(longer / expected == doctest::Approx(1).epsilon(0.01));
}

TEST_CASE("Moments on the host travel both ways in each step") {
  // AdamW's two fp32 numbers of each parameter, half of the parameters per rank; the copies take a
  // thousand times as long as on a real machine, and nothing else takes as long.
  std::mt19937 random(1);
  Case c = DrawCase(random, 2);
  c.cluster = LoadCluster("h100-80 x2, nvlink 450 GB/s, host 1 TiB", 1);
  c.job.global_batch = 2;
  c.job.clip_gradients = false;  // updates wait for no norm
  c.profile.copy.to_host.value *= 1e-3;
  c.profile.copy.to_device.value *= 1e-3;
  const SearchOptions options = NativeSearch(c);
  const Measured measured = Measure(c, options, MakeSpace(c, options), 1);
  const Bounds bounds(c, options, {Bytes(80'000'000'000), Bytes(1'000'000'000'000)});
  OuterChoice outer;
  outer.shard_size = 2;
  outer.offload.moments = true;
  const Occupancy occupancy = bounds.OccupancyOf(outer);
  const double bytes = 2 * 4 * static_cast<double>(CountParameters(c.model)) / 2;
  const double rate =
      c.profile.copy.to_host.value * FindHostCopyRates(c.cluster).to_host_alone.value;
  CHECK(bounds.Of(outer, measured, occupancy).time.value >= 0.999 * bytes / rate);
}

TEST_CASE("Blocks that do less than others say nothing about patterns") {
  // Nothing in front of the blocks learns, so that the first one has no gradient of its input.
  std::mt19937 random(3);
  Case c = DrawCase(random, 6);
  for (Parameter& param : c.model.params) {
    param.trainable = param.fqn.starts_with("block");
  }
  const SearchOptions options = NativeSearch(c);
  const Measured m = Measure(c, options, MakeSpace(c, options), 1);
  std::vector<std::vector<std::size_t>> blocks;
  for (const BlockClass& block_class : m.classes) {
    blocks.push_back(block_class.blocks);
  }
  CHECK(blocks == std::vector<std::vector<std::size_t>>{{1, 2, 3, 4, 5}});
}

}  // namespace shardwright
