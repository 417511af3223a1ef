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
#include "planner/baselines.h"
#include "planner/explain.h"
#include "planner/fixes.h"
#include "planner/front.h"
#include "schedule/lower.h"
#include "schedule/plan_file.h"
#include "simulator/simulate.h"
#include "tests/sanitizers.h"
#include "tests/schedule/chain_model.h"
#include "topologies/scale_links.h"

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

std::string WordsOf(const Plan& plan) {
  std::string text = "shard " + std::to_string(plan.shard_size) + " micro " +
                     std::to_string(plan.micro_batch) + " sync " +
                     std::to_string(static_cast<int>(plan.sync)) + " in flight " +
                     std::to_string(plan.in_flight) + " recompute " +
                     std::to_string(plan.recompute.size()) + " units";
  for (const UnitPlan& unit : plan.units) {
    text += " " + unit.name + "*" + std::to_string(unit.modules.size()) +
            (unit.reshard.kind == Reshard::Kind::kNever ? "k" : "");
  }
  return text;
}

SearchOptions NativeSearch() {
  SearchOptions options;
  options.base.dialect = Dialect::kNative;
  options.threads = 2;
  return options;
}

TEST_CASE("Search is as fast as exhaustive enumeration, or within the gap it proves") {
  const int count = IsDeep() ? 300 : testing::kHasSanitizer ? 2 : 4;
  int equal = 0;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(i));
    const int blocks = static_cast<int>(Draw(random, 2, IsDeep() ? 7 : 4));
    const Case c = DrawCase(random, blocks);
    std::vector<Simulated> all;
    std::vector<Plan> plans;
    ForEachPlan(c, blocks, [&](const Plan& plan) {
      all.push_back(SimulatePlan(c, plan));
      plans.push_back(plan);
    });
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
    if (fastest > best * (1 + options.tie)) {
      for (std::size_t p = 0; p < all.size(); ++p) {
        if (all[p].seconds == best && all[p].memory <= options.memory_limit) {
          MESSAGE("job " << i << " slower by " << fastest / best - 1 << " (gap "
                         << result.proven_gap << ") than " << WordsOf(plans[p]) << "; found "
                         << WordsOf(result.best.plan));
          break;
        }
      }
    }
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

// The bound of all plans with this one's mesh, batch and offload; of all plans where the search
// does not tell it apart (SyncMode::kReplicateLast without shards).
Seconds BoundOf(const SearchResult& result, const Plan& plan) {
  for (const Candidate& c : result.candidates) {
    if (c.plan.shard_size == plan.shard_size && c.plan.micro_batch == plan.micro_batch &&
        c.plan.sync == plan.sync && c.plan.offload == plan.offload) {
      return c.bound;
    }
  }
  return result.lower_bound;
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
      const Seconds own = BoundOf(result, plan);
      CHECK(own.value <= simulated.seconds);
      tightest = std::min(tightest, simulated.seconds / own.value - 1);
    }
  }
  MESSAGE(fitting << " random plans that fit; their bound is below the nearest by " << tightest);
}

// A plan of a chain of `runs` blocks as one of a model with many: each block becomes a run of them.
Plan Spread(Plan plan, const std::string& prefix, int blocks, int runs) {
  const auto layers = [&](const std::string& block) {
    std::vector<std::string> names;
    const int run = std::stoi(block.substr(std::string("block").size()));
    for (int layer = run * blocks / runs; layer < (run + 1) * blocks / runs; ++layer) {
      names.push_back(prefix + std::to_string(layer));
    }
    return names;
  };
  for (UnitPlan& unit : plan.units) {
    std::vector<std::string> modules;
    for (const std::string& module : unit.modules) {
      const std::vector<std::string> names =
          module.empty() ? std::vector<std::string>{""} : layers(module);
      modules.insert(modules.end(), names.begin(), names.end());
    }
    unit.modules = modules;
  }
  std::vector<RecomputeRegion> regions;
  for (const RecomputeRegion& region : plan.recompute) {
    for (const std::string& name : layers(region.module)) {
      regions.push_back({name, region.kind, region.keep_every});
    }
  }
  plan.recompute = regions;
  return plan;
}

TEST_CASE("No random plan of Llama-3-70B on 1,024 GPUs is faster than the bound") {
  if (!IsDeep()) {
    return;
  }
  Case c;
  c.cluster = LoadCluster("dgx-h100", 128);
  c.kernels = FindKernelSet("torch-eager", "test");
  c.profile = DefaultProfile(c.cluster.gpu, c.kernels.name);
  c.job.sequence_length = 2048;
  c.job.global_batch = 1024;
  c.model = LoadModelForJob("llama-3-70b", c.job, Path("test")).model;
  constexpr int kBlocks = 80, kRuns = 30, kPlans = 500;
  std::mt19937 random(70);
  std::vector<std::pair<Simulated, Plan>> all;
  std::vector<Bytes> memory;
  for (int p = 0; p < kPlans; ++p) {
    const Plan plan = Spread(DrawPlan(random, c, kRuns), "model.layers.", kBlocks, kRuns);
    all.emplace_back(SimulatePlan(c, plan), plan);
    memory.push_back(all.back().first.memory);
  }
  std::sort(memory.begin(), memory.end());
  for (const Bytes limit : {memory.back(), memory[kPlans / 2], memory[kPlans / 10]}) {
    SearchOptions options = NativeSearch();
    options.effort = 0;
    options.memory_limit = limit;
    const SearchResult result = Search(c.Input(), options);
    double tightest = INFINITY;
    for (const auto& [simulated, plan] : all) {
      if (simulated.memory <= limit) {
        const Seconds own = BoundOf(result, plan);
        CHECK(result.lower_bound.value <= simulated.seconds);
        CHECK(own.value <= simulated.seconds);
        tightest = std::min(tightest, simulated.seconds / own.value - 1);
      }
    }
    MESSAGE("the bound is below the nearest random plan by " << tightest);
  }
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

PlanFile ZooProblem(const std::string& model, const std::string& cluster, std::int64_t nodes,
                    std::int64_t samples_per_rank) {
  PlanFile file;
  file.job.sequence_length = 0;
  file.cluster = LoadCluster(cluster, nodes);
  file.kernels = FindKernelSet("torch-eager", "test");
  file.profile = DefaultProfile(file.cluster.gpu, file.kernels.name);
  file.model = LoadModelForJob(model, file.job, Path("test"));
  file.job.global_batch = samples_per_rank * file.cluster.RankCount();
  return file;
}

// The search must be at least as fast as what users would have done: for native whatever they use,
// for another dialect what its own frameworks do. Returns whether any of that fits.
bool CheckAgainstBaselines(const PlanFile& problem, Dialect dialect) {
  CAPTURE(problem.model.model.name);
  CAPTURE(problem.cluster.name);
  CAPTURE(NameOf(dialect));
  SearchOptions options = NativeSearch();
  options.base.dialect = dialect;
  options.base.use_orig_params = dialect != Dialect::kFsdp1;  // off as in the baselines
  const SearchResult result =
      Search({problem.model.model, problem.kernels, problem.cluster, problem.profile, problem.job},
             options);
  PlanFile same_limit = problem;
  same_limit.cluster.gpu.usable_memory.value = result.memory_limit;
  bool any_fits = false;
  for (const BaselineResult& baseline : EvaluateBaselines(same_limit)) {
    if (!baseline.Fits() || (dialect != Dialect::kNative && baseline.plan.dialect != dialect)) {
      continue;
    }
    CAPTURE(NameOf(baseline.baseline));
    any_fits = true;
    CHECK(result.is_feasible);
    CHECK(result.best.step_time.value <= ToSeconds(baseline.outcome->step_time).value);
  }
  return any_fits;
}

TEST_CASE("The plan is at least as fast as what users would have done") {
  if (!IsDeep()) {
    CHECK(CheckAgainstBaselines(ZooProblem("pythia-70m", "p4d", 2, 2), Dialect::kNative));
    CHECK(CheckAgainstBaselines(ZooProblem("t5-small", "dgx-a100", 1, 1), Dialect::kFsdp2));
    CHECK(CheckAgainstBaselines(ZooProblem("mnist-convnet", "dgx-a100", 1, 4), Dialect::kNative));
    CHECK(CheckAgainstBaselines(ZooProblem("pythia-70m", "pcie-8x4090", 1, 2), Dialect::kFsdp1));
    return;
  }
  const std::pair<const char*, std::int64_t> kClusters[] = {{"dgx-a100", 1},
                                                            {"dgx-h100", 32},
                                                            {"p4d", 8},
                                                            {"pcie-8x4090", 1},
                                                            {"a100-80 x8, nic 100 Gbit/s", 4}};
  int fitting = 0;
  for (const auto& [cluster, nodes] : kClusters) {
    for (const std::string& model : ZooNames()) {
      const PlanFile problem = ZooProblem(model, cluster, nodes, 2);
      for (const Dialect dialect : {Dialect::kNative, Dialect::kFsdp2}) {
        fitting += CheckAgainstBaselines(problem, dialect) ? 1 : 0;
      }
    }
  }
  MESSAGE(fitting << " jobs with a baseline that fits");
}

// Equal blocks: each is a unit, or each unit has as many of them, and all keep and free alike.
bool IsSymmetric(const Plan& plan, int blocks) {
  std::size_t most = 0;
  std::size_t count = 0;
  for (const UnitPlan& unit : plan.units) {
    const bool is_block = unit.modules.front().starts_with("block");
    count += is_block ? 1 : 0;
    most = std::max(most, is_block ? unit.modules.size() : 0);
  }
  const std::size_t full = most == 0 ? 0 : (static_cast<std::size_t>(blocks) + most - 1) / most;
  return count == full && (plan.recompute.empty() ||
                           std::ssize(plan.recompute) == static_cast<std::ptrdiff_t>(blocks));
}

TEST_CASE("Symmetric layers get symmetric plans unless asymmetry pays more than the tie") {
  int asymmetric = 0, refuted = 0;
  const int count = IsDeep() ? 50 : testing::kHasSanitizer ? 2 : 3;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(50 + i));
    constexpr int kBlocks = 4;
    const Case c = DrawCase(random, kBlocks);
    SearchOptions options = NativeSearch();
    options.fixed.offload = true;
    const SearchResult result = Search(c.Input(), options);
    REQUIRE(result.is_feasible);
    if (IsSymmetric(result.best.plan, kBlocks)) {
      continue;
    }
    ++asymmetric;
    // All symmetric plans: units of equal size, resharding and checkpointing alike in all of them.
    double fastest = INFINITY;
    ForEachPlan(c, kBlocks, [&](const Plan& plan) {
      if (IsSymmetric(plan, kBlocks)) {
        const Simulated s = SimulatePlan(c, plan);
        fastest = s.memory <= result.memory_limit ? std::min(fastest, s.seconds) : fastest;
      }
    });
    refuted += result.best.step_time.value < fastest * (1 - options.tie) ? 0 : 1;
    for (const Candidate& candidate : result.candidates) {
      if (candidate.status == CandidateStatus::kFits && IsSymmetric(candidate.plan, kBlocks)) {
        CHECK(candidate.step_time > result.best.step_time);
      }
    }
  }
  MESSAGE(asymmetric << " of " << count << " plans are asymmetric, " << refuted
                     << " of them pay less than the tie against all symmetric plans");
  CHECK(refuted * 50 <= count);
}

// Another link or the memory each time.
void ScaleBandwidth(Case& c, int which, double factor) {
  const std::vector<std::string> levels = LinkLevels(c.cluster);
  const auto index = static_cast<std::size_t>(which) % (levels.size() + 1);
  if (index < levels.size()) {
    ScaleLinks(c.cluster, levels[index], factor, "test");
  } else {
    c.cluster.gpu.memory_bandwidth.value =
        BytesPerSecond(c.cluster.gpu.memory_bandwidth.value.value * factor);
  }
}

TEST_CASE("A change of a bandwidth by 0.1 % keeps the plan, or gains a percent") {
  const int count = IsDeep() ? 100 : testing::kHasSanitizer ? 1 : 4;
  int flips = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(80 + i));
    Case c = DrawCase(random, 3);
    SearchOptions options = NativeSearch();
    const SearchResult before = Search(c.Input(), options);
    ScaleBandwidth(c, i, 1.001);
    REQUIRE(before.is_feasible);
    options.previous = &before.best.plan;
    const SearchResult after = Search(c.Input(), options);
    REQUIRE(after.is_feasible);
    if (after.best.plan == before.best.plan) {
      continue;
    }
    ++flips;
    const Simulated old = SimulatePlan(c, before.best.plan);
    CHECK(after.best.step_time.value <= old.seconds * (1 - options.tie));
  }
  MESSAGE(flips << " of " << count << " plans changed");
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

TEST_CASE("SearchFront: no plan of the front beats another, and the ends are the two objectives") {
  std::mt19937 random(21);
  const Case c = DrawCase(random, 3);
  SearchOptions options = NativeSearch();
  options.fixed.offload = true;
  const SearchResult front = SearchFront(c.Input(), options);
  REQUIRE(front.is_feasible);
  REQUIRE_FALSE(front.pareto.empty());
  for (std::size_t i = 1; i < front.pareto.size(); ++i) {
    const Candidate& before = front.candidates[front.pareto[i - 1]];
    const Candidate& after = front.candidates[front.pareto[i]];
    CHECK(before.step_time < after.step_time);
    CHECK(before.memory > after.memory);
  }
  options.objective = Objective::kMemory;
  const SearchResult least = Search(c.Input(), options);
  CHECK(front.candidates[front.pareto.back()].memory <= least.candidates[least.best.index].memory);
  CHECK(front.candidates[front.pareto.front()].step_time <= front.best.step_time);
}

TEST_CASE("SearchNodes: GPU-hours of a token budget, and the cheapest count") {
  std::mt19937 random(5);
  Case c = DrawCase(random, 2);
  c.cluster = LoadCluster("h100-80 x2, nvlink 450 GB/s, nic 2x200 Gbit/s", 1);
  c.job.global_batch = 8;
  const std::int64_t tokens = 8 * c.model.tokens_per_sample * 100 + 1;  // 101 steps
  const std::vector<NodeCountResult> rows =
      SearchNodes(c.Input(), NativeSearch(), {1, 3, 4}, tokens);
  REQUIRE(rows.size() == 3);
  CHECK(rows[1].refusal == "the global batch is no multiple of its ranks");
  for (const std::size_t i : {0U, 2U}) {
    REQUIRE(rows[i].Fits());
    CHECK(rows[i].steps == 101);
    CHECK(rows[i].total.value == doctest::Approx(101 * rows[i].result->best.step_time.value));
    CHECK(rows[i].gpu_hours ==
          doctest::Approx(rows[i].total.value / 3600 * static_cast<double>(rows[i].ranks)));
  }
  const std::size_t cheaper = rows[0].gpu_hours < rows[2].gpu_hours ? 0 : 2;
  CHECK(CheapestOf(rows, 0) == cheaper);
  // Within a large enough tie the one that is done first.
  CHECK(CheapestOf(rows, 1e9) == (rows[0].total < rows[2].total ? 0U : 2U));
  CHECK_FALSE(CheapestOf({rows[1]}, 0));
}

TEST_CASE("ExplainChoice: the nearest other choices, as each plan by itself") {
  std::mt19937 random(9);
  const Case c = DrawCase(random, 4);
  const SearchOptions options = NativeSearch();
  const SearchResult result = Search(c.Input(), options);
  REQUIRE(result.is_feasible);
  const Explanation e = ExplainChoice(c.Input(), options, result);
  int in_flight = 0;
  for (const Alternative& a : e.alternatives) {
    CAPTURE(a.choice);
    CAPTURE(a.value);
    if (a.choice == "prefetch") {
      ++in_flight;
      Plan plan = result.best.plan;
      plan.in_flight = std::stoll(a.value);
      const Simulated s = SimulatePlan(c, plan);
      CHECK(a.step_time.value == s.seconds);
      CHECK(a.memory == s.memory);
    }
    // Nothing that fits and was refitted is faster: the search would have taken it.
    if (a.fits && a.is_refitted) {
      CHECK(a.step_time.value >= result.best.step_time.value * (1 - options.tie));
    }
  }
  CHECK(in_flight > 0);
  // More of everything never slows by more than the tie, and something has to matter.
  REQUIRE_FALSE(e.sensitivities.empty());
  CHECK(e.sensitivities.front().gain > 0);
  CHECK(e.notes.size() == 2);
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
