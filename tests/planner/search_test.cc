#include "planner/search.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "planner/baselines.h"
#include "planner/evaluate.h"
#include "planner/explain.h"
#include "planner/fixes.h"
#include "planner/front.h"
#include "schedule/lower.h"
#include "schedule/place.h"
#include "schedule/plan_file.h"
#include "schedule/wrap.h"
#include "simulator/simulate.h"
#include "tests/planner/random_jobs.h"
#include "tests/schedule/chain_model.h"

namespace shardwright {
namespace {

using testing::Case;
using testing::DrawCase;
using testing::IsDeep;
using testing::NativeSearch;
using testing::Simulated;
using testing::SimulatePlan;

TEST_CASE("The result does not depend on the number of threads") {
  std::mt19937 random(7);
  const Case c = DrawCase(random, 4);
  SearchOptions options = NativeSearch(c);
  options.threads = 1;
  const SearchResult one = Search(c, options);
  options.threads = 4;
  const SearchResult four = Search(c, options);
  CHECK(one.candidates == four.candidates);
  CHECK(one.best.index == four.best.index);
  CHECK(one.lower_bound == four.lower_bound);
  CHECK(one.pareto == four.pareto);
}

// Of all units at once; where nothing is said, units of blocks are freed as they were cut: at once.
TEST_CASE("The label of a candidate says when its units are freed") {
  std::mt19937 random(5);
  int said = 0;
  for (int trial = 0; trial < 4; ++trial) {
    const Case c = DrawCase(random, 4);
    for (const Candidate& candidate : Search(c, NativeSearch(c)).candidates) {
      const std::string& label = candidate.label;
      const auto says = [&](const char* what) { return label.find(what) != std::string::npos; };
      if (candidate.plan.units.size() < 2 || says("reshard never in the last") ||
          !says(" blocks,")) {
        continue;
      }
      CAPTURE(label);
      const Reshard::Kind kind = candidate.plan.units.front().reshard.kind;
      CHECK(says(", reshard never") == (kind == Reshard::Kind::kNever));
      CHECK(says(", reshard to groups of") == (kind == Reshard::Kind::kToGroup));
      said += says(", reshard ") ? 1 : 0;
    }
  }
  CHECK(said > 0);  // not vacuous
}

TEST_CASE("What is faster and not chosen is said to offload more only where it does") {
  const auto count = [](const Offload& o) {
    return int{o.parameters} + int{o.optimizer} + int{o.activations} + int{o.moments};
  };
  std::mt19937 random(6);
  int told = 0;
  for (int trial = 0; trial < 12; ++trial) {
    const Case c = DrawCase(random, 4);
    CAPTURE(trial);
    const SearchResult result = Search(c, NativeSearch(c));
    for (const Candidate& candidate : result.candidates) {
      if (!candidate.why_not.empty()) {
        CAPTURE(candidate.why_not);
        CHECK(candidate.why_not.ends_with("but offloads more") ==
              (count(candidate.plan.offload) > count(result.best.plan.offload)));
        ++told;
      }
    }
  }
  CHECK(told > 0);  // not vacuous
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

// What the bound counts under fsdp2, and what the search does about the allocator: each is the most
// of the gap of one of these jobs. Without the copies around collectives the first one's gap is 6
// %; where the most promising plans are not fitted to less memory once the allocator has refused
// them, the second one's is 10 %; and the third one's is above 40 % without the padding of experts
// (8 of a layer over more than 8 ranks), without the gradients beside all states, and without the
// update of the fullest shard on the host. The fourth one's is 9 % where 6 % less is all that is
// tried, since the allocator takes 12 % beside its plans.
TEST_CASE("The proven gap under fsdp2 is small") {
  struct Row {
    std::string model;
    std::int64_t nodes = 1, samples_per_rank = 1;
    double gap = 0;
  };
  for (const Row& row : {Row{"llama-2-13b", 4, 4, 0.03}, Row{"qwen3-14b", 8, 2, 0.04},
                         Row{"mixtral-8x7b", 8, 4, 0.13}, Row{"llama-2-70b", 8, 2, 0.06}}) {
    CAPTURE(row.model);
    PlanFile problem = ZooProblem(row.model, "dgx-h100", row.nodes, row.samples_per_rank);
    problem.job.sequence_length = 4096;
    problem.job.memory_margin = DefaultMargin(problem.cluster, problem.profile);
    problem.model = LoadModelForJob(row.model, problem.job, Path("test"));
    SearchOptions options = NativeSearch();
    options.base.dialect = Dialect::kFsdp2;
    const SearchResult result = Search(problem, options);
    REQUIRE(result.is_feasible);
    CHECK(result.proven_gap < row.gap);
  }
}

// The search must be at least as fast as what users would have done: for native whatever they use,
// for another dialect what its own frameworks do. What native cannot say to the last launch of a
// kernel (FSDP1's flat parameters) it must reach within the tie. Returns whether any of that fits.
bool CheckAgainstBaselines(const PlanFile& problem, Dialect dialect) {
  CAPTURE(problem.model.name);
  CAPTURE(problem.cluster.name);
  CAPTURE(NameOf(dialect));
  SearchOptions options = NativeSearch();
  options.base.dialect = dialect;
  options.base.use_orig_params = dialect != Dialect::kFsdp1;  // off as in the baselines
  const SearchResult result = Search(problem, options);
  bool any_fits = false;
  for (const BaselineResult& baseline : EvaluateBaselines(problem, {}, result.memory_limit)) {
    if (!baseline.Fits() || (dialect != Dialect::kNative && baseline.plan.dialect != dialect)) {
      continue;
    }
    CAPTURE(NameOf(baseline.baseline));
    any_fits = true;
    CHECK(result.is_feasible);
    const Outcome outcome =  // with the job's optimizer
        baseline.fuses_adam ? Evaluate(problem, baseline.plan) : *baseline.outcome;
    if (!outcome.Fits() || outcome.retries_per_step > result.best.retries) {
      continue;  // the search looks for a plan that the allocator can take as it is
    }
    const double slack = baseline.plan.dialect == dialect ? 1.0 : 1.0 + options.tie;
    CHECK(result.best.step_time.value <= outcome.step_time.value * slack);
  }
  return any_fits;
}

// All plans that the bound did not prune fit by what they allocate, and the allocator takes none.
TEST_CASE("Plans that are slower than what the allocator refuses are looked at after all") {
  CHECK(CheckAgainstBaselines(ZooProblem("gemma-2-2b", "pcie-8x4090", 1, 2), Dialect::kFsdp2));
}

// gpt2 on four GPUs of so many bytes, and a plan by hand: blocks as units, all recomputed, with
// parameters on the host.
PlanFile TightProblem(double bytes) {
  PlanFile file = ZooProblem("gpt2", "h100-80 x4, nvlink 450 GB/s", 1, 2);
  file.job.memory_margin =
      1 - bytes / static_cast<double>(file.cluster.gpu.usable_memory.value.value);
  file.plan.shard_size = 4;
  file.plan.accumulation = 2;
  file.plan.offload.parameters = true;
  file.plan.units = Wrap(file.model, ParseWrap("block", "test"),
                         {true, {Reshard::Kind::kAlways, 0}}, Dialect::kFsdp2, "test");
  for (int b = 0; b < 12; ++b) {
    file.plan.recompute.push_back({"transformer.h." + std::to_string(b), RecomputeKind::kFull, 1});
  }
  return file;
}

SearchResult SearchTight(const PlanFile& file) {
  SearchOptions options = NativeSearch();
  options.base.dialect = Dialect::kFsdp2;
  return Search({file.model, file.kernels, file.cluster, file.profile, file.job}, options);
}

// None of the plans that the first round finds; the one by hand it takes.
TEST_CASE("Where the allocator refuses all plans, others are fitted to less memory") {
  for (const double bytes : {3.06e9, 3.3e9, 3.38e9}) {
    CAPTURE(bytes);
    PlanFile file = TightProblem(bytes);
    REQUIRE(Evaluate(file, file.plan).Fits());
    const SearchResult result = SearchTight(file);
    REQUIRE(result.is_feasible);
    file.plan = result.best.plan;
    CHECK(Evaluate(file, file.plan).Fits());
  }
}

// A plan that retries, chosen for want of a better one, is no reason to end: by hand there is one
// without.
TEST_CASE("A plan that retries is chosen only where plans with less memory are no faster") {
  for (const double bytes : {3.26e9, 3.28e9}) {
    CAPTURE(bytes);
    const PlanFile file = TightProblem(bytes);
    const Outcome by_hand = Evaluate(file, file.plan);
    REQUIRE(by_hand.Fits());
    REQUIRE(by_hand.retries_per_step == 0);
    const SearchResult result = SearchTight(file);
    CHECK(result.best.retries == 0);
    CHECK(result.best.step_time <= by_hand.step_time);
  }
}

TEST_CASE("The plan is at least as fast as what users would have done") {
  if (!IsDeep()) {
    CHECK(CheckAgainstBaselines(ZooProblem("pythia-70m", "p4d", 2, 2), Dialect::kNative));
    CHECK(CheckAgainstBaselines(ZooProblem("t5-small", "dgx-a100", 1, 1), Dialect::kFsdp2));
    CHECK(CheckAgainstBaselines(ZooProblem("mnist-convnet", "dgx-a100", 1, 4), Dialect::kNative));
    CHECK(CheckAgainstBaselines(ZooProblem("pythia-70m", "pcie-8x4090", 1, 2), Dialect::kFsdp1));
    // 140 GB of weights: the bound of memory must know that stage 3 shards them.
    CHECK(CheckAgainstBaselines(ZooProblem("llama-2-70b", "dgx-h100", 4, 2), Dialect::kZero3));
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

// Told from one program of the plan, its memory is what simulating all of the plan says.
TEST_CASE("Plans that do not fit have a memory and no time") {
  const PlanFile problem = ZooProblem("llama-2-7b", "p4d", 1, 32);
  SearchOptions options = NativeSearch();
  options.base.dialect = Dialect::kFsdp2;
  const SearchResult result = Search(problem, options);
  std::size_t over = 0;
  for (const Candidate& c : result.candidates) {
    const bool is_simulated = c.memory > Bytes(0);
    const bool fits = is_simulated && c.memory <= result.memory_limit;
    CHECK((c.step_time > Seconds(0)) == fits);
    constexpr std::size_t kMostOver = 12;
    if (is_simulated && !fits && over < kMostOver) {
      ++over;
      PlanFile file = problem;
      file.plan = c.plan;
      const Outcome whole = Evaluate(file, file.plan, {.reserved = false});
      CHECK(c.memory == whole.device_peak.total + whole.outside);
      CHECK(c.deficit == c.memory - result.memory_limit);
    }
  }
  CHECK(over > 2);
}

TEST_CASE("A plan of many micro-batches costs what simulating all of them says") {
  const PlanFile problem = ZooProblem("pythia-70m", "pcie-8x4090", 1, 48);
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kNative}) {
    CAPTURE(NameOf(dialect));
    SearchOptions options = NativeSearch();
    options.base.dialect = dialect;
    options.base.micro_batch = 1;
    options.fixed.micro_batch = true;
    const SearchResult result = Search(problem, options);
    REQUIRE(result.is_feasible);
    REQUIRE(result.best.plan.accumulation == 48);
    const Program whole = Lower({problem, result.best.plan});
    SimulateOptions simulate;
    simulate.allocator.capacity =
        UsableMemory(problem) - OutsideBytes(whole, problem.profile.memory);
    const SimulationResult exact = Simulate(whole, problem.cluster, problem.profile, simulate);
    const ReservedMemory& reserved = *exact.memory.reserved;
    CHECK(result.best.step_time == ToSeconds(exact.step_time));
    CHECK(result.best.peak.total == exact.memory.allocated.DevicePeak().total);
    CHECK(result.best.reserved == std::max(reserved.peak_first, reserved.peak_steady));
    CHECK(result.best.retries == reserved.retries_steady);
    const Bytes taken =
        dialect == Dialect::kNative ? Place(whole).device_size : result.best.reserved;
    CHECK(result.candidates[result.best.index].needed == taken + exact.memory.outside);
  }
}

// The last layer before the head has fewer gathers than the others have, which several copies of a
// layer that were jumped at once did not notice: six ops were left out and the run never ended.
TEST_CASE("A job that cannot fit says by how much, and what would help") {
  std::mt19937 random(3);
  const Case c = DrawCase(random, 4);
  SearchOptions options = NativeSearch(c);
  options.fixed.offload = true;
  options.memory_limit = Bytes(1);
  const SearchResult result = Search(c, options);
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
  if (!Search(c, options).is_feasible) {
    const std::vector<Fix> fixes = FindFixes(c, options);
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
  c.model = {testing::ChainModel(spec)};
  c.job.sequence_length = spec.rows;
  c.cluster = LoadCluster("h100-80 x8, nvlink 450 GB/s, nic 1x25 Gbit/s", 4);
  c.job.global_batch = 32;
  c.job.precision.reduce = DType::kBf16;  // fp32 reductions weigh more than gathers either way
  SearchOptions options = NativeSearch(c);
  options.fixed.offload = true;
  const SearchResult free = Search(c, options);
  REQUIRE(free.is_feasible);
  CHECK(free.best.plan.shard_size <= 8);
  options.fixed.mesh = true;
  options.base.shard_size = 32;
  const SearchResult full = Search(c, options);
  REQUIRE(full.is_feasible);
  CHECK(free.best.step_time < full.best.step_time);
}

TEST_CASE("SearchFront: no plan of the front beats another, and the ends are the two objectives") {
  std::mt19937 random(21);
  const Case c = DrawCase(random, 3);
  SearchOptions options = NativeSearch(c);
  options.fixed.offload = true;
  const SearchResult front = SearchFront(c, options);
  REQUIRE(front.is_feasible);
  REQUIRE_FALSE(front.pareto.empty());
  for (std::size_t i = 1; i < front.pareto.size(); ++i) {
    const Candidate& before = front.candidates[front.pareto[i - 1]];
    const Candidate& after = front.candidates[front.pareto[i]];
    CHECK(before.step_time < after.step_time);
    CHECK(before.Needs() > after.Needs());
  }
  options.objective = Objective::kMemory;
  const SearchResult least = Search(c, options);
  CHECK(front.candidates[front.pareto.back()].memory <= least.candidates[least.best.index].memory);
  CHECK(front.candidates[front.pareto.front()].step_time <= front.best.step_time);
}

TEST_CASE("SearchNodes: GPU-hours of a token budget, and the cheapest count") {
  std::mt19937 random(5);
  Case c = DrawCase(random, 2);
  c.cluster = LoadCluster("h100-80 x2, nvlink 450 GB/s, nic 2x200 Gbit/s", 1);
  c.job.global_batch = 8;
  const std::int64_t tokens = 8 * c.model.tokens_per_sample * 100 + 1;  // 101 steps
  const std::vector<NodeCountResult> rows = SearchNodes(c, NativeSearch(c), {1, 3, 4}, tokens);
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

// With a given shard size the replicas are as many as the ranks leave.
TEST_CASE("SearchNodes: a shard size that divides the ranks, and one that does not") {
  std::mt19937 random(5);
  Case c = DrawCase(random, 2);
  c.cluster = LoadCluster("h100-80 x2, nvlink 450 GB/s, nic 2x200 Gbit/s", 1);
  c.job.global_batch = 8;
  SearchOptions options = NativeSearch(c);
  options.fixed.mesh = true;
  options.base.shard_size = 4;
  const std::vector<NodeCountResult> rows = SearchNodes(c, options, {1, 4}, 1);
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].refusal == "the shard size does not divide its ranks");  // 4 and 2
  CHECK_FALSE(rows[0].result);
  REQUIRE(rows[1].Fits());
  CHECK(rows[1].refusal.empty());
  CHECK(rows[1].result->best.plan.shard_size == 4);
  CHECK(rows[1].result->best.plan.replicate_size == 2);
}

TEST_CASE("ExplainChoice: the nearest other choices, as each plan by itself") {
  std::mt19937 random(9);
  const Case c = DrawCase(random, 4);
  const SearchOptions options = NativeSearch(c);
  const SearchResult result = Search(c, options);
  REQUIRE(result.is_feasible);
  const Explanation e = ExplainChoice(c, options, result);
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
  CHECK_THROWS_WITH_AS((void)Search(c, NativeSearch(c)),
                       "job: got a global batch of 6, expected a multiple of the 4 ranks",
                       InputError);
  c.job.trains_by = TrainsBy::kDpo;
  c.job.global_batch = 4;
  CHECK_THROWS_WITH_AS(
      (void)Search(c, NativeSearch(c)),
      "job: got a global batch of 4, expected a multiple of the 4 ranks x 2 samples of a pair",
      InputError);
}

}  // namespace
}  // namespace shardwright
