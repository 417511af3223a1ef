#include "planner/search.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "planner/fixes.h"
#include "schedule/lower.h"
#include "simulator/simulate.h"
#include "tests/sanitizers.h"
#include "tests/schedule/chain_model.h"

namespace shardwright {
namespace {

// A job small enough to try all of its plans.
struct Case {
  Model model;
  KernelSetOptions kernels;
  Cluster cluster;
  Profile profile;
  Job job;

  [[nodiscard]] SearchInput Input() const { return {model, kernels, cluster, profile, job}; }
};

std::int64_t Draw(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

bool IsDeep() {
  return std::getenv("SHARDWRIGHT_DEEP") != nullptr;
}

Case DrawCase(std::mt19937& random, int blocks) {
  Case c;
  testing::ChainSpec spec;
  spec.blocks = blocks;
  spec.linears = static_cast<int>(Draw(random, 1, 3));
  spec.width = 256 * Draw(random, 1, 8);
  spec.rows = 64 << Draw(random, 0, 5);
  c.model = testing::ChainModel(spec);
  c.kernels = FindKernelSet("shardwright-cuda", "test");
  const std::int64_t gpus = std::int64_t{1} << Draw(random, 0, 2);
  const std::int64_t nodes = std::int64_t{1} << Draw(random, 0, 1);
  c.cluster =
      LoadCluster("h100-80 x" + std::to_string(gpus) + ", nvlink " +
                      std::to_string(Draw(random, 5, 450)) + " GB/s, nic " + std::to_string(gpus) +
                      "x" + std::to_string(Draw(random, 25, 400)) + " Gbit/s, host 1 TiB",
                  nodes);
  c.profile = DefaultProfile(c.cluster.gpu, c.kernels.name);
  c.job.sequence_length = spec.rows;
  c.job.global_batch = c.cluster.RankCount() * Draw(random, 1, 2);
  c.job.clip_gradients = Draw(random, 0, 1) == 1;
  return c;
}

struct Simulated {
  double seconds = INFINITY;
  Bytes memory;
};

Simulated SimulatePlan(const Case& c, const Plan& plan) {
  const Program program = Lower({c.model, c.kernels, c.job, plan});
  SimulateOptions options;
  options.reserved = false;
  const SimulationResult result = Simulate({program, c.cluster, c.profile, options});
  return {ToSeconds(result.step_time).value,
          result.memory.allocated.DevicePeak().total + result.memory.outside};
}

// All partitions of the blocks into runs of neighbours: bit i cuts behind block i.
std::vector<UnitPlan> UnitsOf(int blocks, unsigned cuts, const Reshard& reshard) {
  std::vector<UnitPlan> units;
  UnitPlan unit;
  for (int b = 0; b < blocks; ++b) {
    unit.modules.push_back("block" + std::to_string(b));
    if (b + 1 == blocks || ((cuts >> b) & 1U) != 0) {
      unit.name = unit.modules.front();
      unit.reshard = reshard;
      units.push_back(unit);
      unit = UnitPlan();
    }
  }
  units.push_back({"root", {""}, {Reshard::Kind::kNever, 0}, Gap::kHold, {}, {}});
  return units;
}

// Calls f(plan) for each mesh, micro-batch, partition, resharding, in-flight limit and number of
// checkpointed blocks.
template <class F>
void ForEachPlan(const Case& c, int blocks, F f) {
  const std::int64_t ranks = c.cluster.RankCount();
  const std::int64_t samples = c.job.global_batch / ranks;
  for (std::int64_t shard = 1; shard <= ranks; shard *= 2) {
    for (std::int64_t micro_batch = 1; micro_batch <= samples; ++micro_batch) {
      for (unsigned cuts = 0; cuts < (1U << (blocks - 1)); ++cuts) {
        for (const Reshard::Kind kind : {Reshard::Kind::kAlways, Reshard::Kind::kNever}) {
          for (std::int64_t in_flight = 1; in_flight <= 3; ++in_flight) {
            for (int checkpointed = 0; checkpointed <= blocks; checkpointed += blocks) {
              Plan plan;
              plan.dialect = Dialect::kNative;
              plan.shard_size = shard;
              plan.replicate_size = ranks / shard;
              plan.micro_batch = micro_batch;
              plan.accumulation = samples / micro_batch;
              plan.in_flight = in_flight;
              plan.units = UnitsOf(blocks, cuts, {kind, 0});
              for (int b = 0; b < checkpointed; ++b) {
                plan.recompute.push_back({"block" + std::to_string(b), RecomputeKind::kFull, 1});
              }
              f(plan);
            }
          }
        }
      }
    }
  }
}

SearchOptions NativeSearch() {
  SearchOptions options;
  options.base.dialect = Dialect::kNative;
  options.threads = 2;
  return options;
}

TEST_CASE("Search is as fast as exhaustive enumeration, or within the gap it proves") {
  const int count = IsDeep() ? 300 : testing::kHasSanitizer ? 2 : 6;
  int equal = 0;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(i));
    const int blocks = static_cast<int>(Draw(random, 2, IsDeep() ? 7 : 4));
    const Case c = DrawCase(random, blocks);
    std::vector<Simulated> all;
    ForEachPlan(c, blocks, [&](const Plan& plan) { all.push_back(SimulatePlan(c, plan)); });
    SearchOptions options = NativeSearch();
    // Between the least memory of all plans and the most.
    const auto [least, most] = std::minmax_element(
        all.begin(), all.end(),
        [](const Simulated& x, const Simulated& y) { return x.memory < y.memory; });
    options.memory_limit =
        least->memory + Bytes((most->memory - least->memory).value * Draw(random, 1, 4) / 3);
    double best = INFINITY;
    for (const Simulated& s : all) {
      best = s.memory <= options.memory_limit ? std::min(best, s.seconds) : best;
    }
    const SearchResult result = Search(c.Input(), options);
    REQUIRE(result.is_feasible);
    CHECK(result.lower_bound.value <= best * (1 + 1e-9));
    CHECK(result.best.step_time.value * (1 - result.proven_gap) <= best * (1 + 1e-9));
    double fastest = INFINITY;
    for (const Candidate& candidate : result.candidates) {
      if (candidate.status == CandidateStatus::kFits) {
        fastest = std::min(fastest, candidate.step_time.value);
      }
    }
    CHECK(result.best.step_time.value <= fastest * (1 + options.tie) * (1 + 1e-9));
    equal += fastest <= best * (1 + 1e-9) ? 1 : 0;
    worst = std::max(worst, fastest / best - 1);
  }
  MESSAGE("as fast as enumeration or faster in " << equal << " of " << count
                                                 << " jobs; at worst slower by " << worst);
}

// Any plan of the space that docs/planning.md describes.
Plan DrawPlan(std::mt19937& random, const Case& c, int blocks) {
  Plan plan;
  plan.dialect = Dialect::kNative;
  const std::int64_t ranks = c.cluster.RankCount();
  do {
    plan.shard_size = Draw(random, 1, ranks);
  } while (ranks % plan.shard_size != 0);
  plan.replicate_size = ranks / plan.shard_size;
  const std::int64_t samples = c.job.global_batch / ranks;
  do {
    plan.micro_batch = Draw(random, 1, samples);
  } while (samples % plan.micro_batch != 0);
  plan.accumulation = samples / plan.micro_batch;
  if (plan.accumulation > 1) {
    plan.sync = Draw(random, 0, 1) == 1 ? SyncMode::kLast : SyncMode::kEvery;
    if (plan.replicate_size > 1 && Draw(random, 0, 2) == 0) {
      plan.sync = SyncMode::kReplicateLast;
    }
  }
  plan.in_flight = Draw(random, 1, 6);
  plan.offload.activations = Draw(random, 0, 3) == 0;
  (Draw(random, 0, 1) == 1 ? plan.offload.parameters : plan.offload.optimizer) =
      Draw(random, 0, 5) == 0;
  plan.units = UnitsOf(blocks, static_cast<unsigned>(Draw(random, 0, (1 << (blocks - 1)) - 1)), {});
  for (UnitPlan& unit : plan.units) {
    const std::int64_t reshard = Draw(random, 0, 3);
    if (reshard == 0) {
      unit.reshard = {Reshard::Kind::kNever, 0};
    } else if (reshard == 1 && plan.shard_size > 2) {
      unit.reshard = {Reshard::Kind::kToGroup, plan.shard_size / 2};
    }
    const UnitPlan& other =
        plan.units[static_cast<std::size_t>(Draw(random, 0, std::ssize(plan.units) - 1))];
    if (Draw(random, 0, 4) == 0 && other.name != unit.name) {
      (Draw(random, 0, 1) == 1 ? unit.forward_prefetch : unit.backward_prefetch)
          .push_back(other.name);
    }
  }
  for (int b = 0; b < blocks; ++b) {
    const std::int64_t kind = Draw(random, 0, 3);
    if (kind < 2) {
      plan.recompute.push_back({"block" + std::to_string(b),
                                kind == 0 ? RecomputeKind::kFull : RecomputeKind::kSelective,
                                Draw(random, 1, 3)});
    }
  }
  return plan;
}

TEST_CASE("No random plan is faster than the bound") {
  const int jobs = IsDeep() ? 100 : testing::kHasSanitizer ? 3 : 10;
  const int plans = IsDeep() ? 1000 : testing::kHasSanitizer ? 20 : 100;
  int fitting = 0;
  double tightest = INFINITY;
  for (int i = 0; i < jobs; ++i) {
    std::mt19937 random(static_cast<unsigned>(1000 + i));
    const int blocks = static_cast<int>(Draw(random, 2, 8));
    const Case c = DrawCase(random, blocks);
    SearchOptions options = NativeSearch();
    options.effort = 0;
    std::vector<std::pair<Simulated, Plan>> all;
    for (int p = 0; p < plans; ++p) {
      const Plan plan = DrawPlan(random, c, blocks);
      all.emplace_back(SimulatePlan(c, plan), plan);
    }
    options.memory_limit = all[0].first.memory;
    for (const auto& [simulated, plan] : all) {
      options.memory_limit = Draw(random, 0, 3) == 0
                                 ? std::max(options.memory_limit, simulated.memory)
                                 : options.memory_limit;
    }
    const SearchResult result = Search(c.Input(), options);
    for (const auto& [simulated, plan] : all) {
      if (simulated.memory > options.memory_limit) {
        continue;
      }
      ++fitting;
      CAPTURE(i);
      CAPTURE(plan.shard_size);
      CAPTURE(plan.micro_batch);
      CAPTURE(plan.offload.activations);
      CHECK(result.lower_bound.value <= simulated.seconds);
      tightest = std::min(tightest, simulated.seconds / result.lower_bound.value - 1);
    }
  }
  MESSAGE(fitting << " random plans that fit; the bound is below the fastest by " << tightest);
}

TEST_CASE("The result does not depend on the number of threads") {
  std::mt19937 random(7);
  const Case c = DrawCase(random, 4);
  SearchOptions options = NativeSearch();
  options.threads = 1;
  const SearchResult one = Search(c.Input(), options);
  options.threads = 4;
  const SearchResult four = Search(c.Input(), options);
  CHECK(one.candidates == four.candidates);
  CHECK(one.best.index == four.best.index);
  CHECK(one.lower_bound == four.lower_bound);
  CHECK(one.pareto == four.pareto);
}

TEST_CASE("Equal blocks get equal units while memory is ample") {
  for (int i = 0; i < 5; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(50 + i));
    const Case c = DrawCase(random, 4);
    SearchOptions options = NativeSearch();
    options.fixed.offload = true;
    const SearchResult result = Search(c.Input(), options);
    REQUIRE(result.is_feasible);
    CHECK(result.best.plan.recompute.empty());  // nothing is gained by it
  }
}

TEST_CASE("A small change of a bandwidth keeps the plan, or gains a percent or memory") {
  for (int i = 0; i < (testing::kHasSanitizer ? 1 : 4); ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(80 + i));
    Case c = DrawCase(random, 3);
    const SearchOptions options = NativeSearch();
    const SearchResult before = Search(c.Input(), options);
    c.cluster.gpu.memory_bandwidth.value =
        BytesPerSecond(c.cluster.gpu.memory_bandwidth.value.value * 1.001);
    const SearchResult after = Search(c.Input(), options);
    REQUIRE((before.is_feasible && after.is_feasible));
    if (after.best.plan == before.best.plan) {
      continue;
    }
    const Simulated old = SimulatePlan(c, before.best.plan);
    const Simulated now = SimulatePlan(c, after.best.plan);
    const bool pays = now.seconds <= old.seconds * (1 - options.tie) || now.memory < old.memory ||
                      after.best.host_memory < before.best.host_memory;
    CHECK(pays);
  }
}

TEST_CASE("A job that cannot fit says by how much, and what would help") {
  std::mt19937 random(3);
  const Case c = DrawCase(random, 4);
  SearchOptions options = NativeSearch();
  options.fixed.offload = true;
  options.memory_limit = Bytes(1);
  const SearchResult result = Search(c.Input(), options);
  CHECK_FALSE(result.is_feasible);
  REQUIRE(result.floor.candidate.memory > Bytes(1));
  Bytes sum = result.floor.outside;
  for (const Bytes bytes : result.floor.peak.by_category) {
    sum += bytes;
  }
  CHECK(sum == result.floor.candidate.memory);
  for (const RejectedFamily& family : result.rejected) {
    CHECK(family.reason == "memory");
    CHECK(family.least_deficit > Bytes(0));
  }
  // One byte less than the least with checkpointing: checkpointing off cannot do it, on it can.
  options.memory_limit = result.floor.candidate.memory + Bytes(1 << 20);
  options.fixed.recompute = true;
  if (!Search(c.Input(), options).is_feasible) {
    const std::vector<Fix> fixes = FindFixes(c.Input(), options);
    CHECK(std::any_of(fixes.begin(), fixes.end(),
                      [](const Fix& fix) { return fix.change == "without --recompute"; }));
  }
}

TEST_CASE("Slow links between nodes make hybrid sharding win") {
  std::mt19937 random(11);
  Case c = DrawCase(random, 6);
  testing::ChainSpec spec;
  spec.blocks = 6;
  spec.width = 4096;
  spec.rows = 2048;
  spec.linears = 4;
  c.model = testing::ChainModel(spec);
  c.job.sequence_length = spec.rows;
  c.cluster = LoadCluster("h100-80 x8, nvlink 450 GB/s, nic 1x25 Gbit/s", 4);
  c.job.global_batch = 32;
  c.job.precision.reduce = DType::kBf16;  // fp32 reductions weigh more than gathers either way
  SearchOptions options = NativeSearch();
  options.fixed.offload = true;
  const SearchResult free = Search(c.Input(), options);
  REQUIRE(free.is_feasible);
  CHECK(free.best.plan.shard_size <= 8);
  options.fixed.mesh = true;
  options.base.shard_size = 32;
  const SearchResult full = Search(c.Input(), options);
  REQUIRE(full.is_feasible);
  CHECK(free.best.step_time < full.best.step_time);
}

TEST_CASE("Jobs that no plan can have are refused") {
  std::mt19937 random(1);
  Case c = DrawCase(random, 2);
  c.cluster = LoadCluster("h100-80 x4, nvlink 450 GB/s", 1);
  c.job.global_batch = 6;
  CHECK_THROWS_WITH_AS((void)Search(c.Input(), NativeSearch()),
                       "job: got a global batch of 6, expected a multiple of the 4 ranks",
                       InputError);
}

}  // namespace
}  // namespace shardwright
