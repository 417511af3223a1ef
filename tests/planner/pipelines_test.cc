// Searches over plans with a pipeline: bounds against random plans, and the search against all
// plans of small jobs.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "planner/evaluate.h"
#include "planner/evaluator.h"
#include "planner/search.h"
#include "planner/space.h"
#include "planner/stage_parts.h"
#include "tests/planner/random_jobs.h"
#include "tests/sanitizers.h"
#include "tests/schedule/chain_model.h"
#include "topologies/mesh.h"

namespace shardwright {
namespace {

using testing::Case;
using testing::Draw;
using testing::DrawCase;
using testing::IsDeep;
using testing::UnitsOf;

// A job whose ranks make a pipeline, and what of the plan is given.
struct Piped {
  Case job;
  SearchOptions options;
  int blocks = 0;
};

SearchOptions PipelineSearch(std::int64_t ranks, std::int64_t stages, PipelineSchedule schedule) {
  SearchOptions options;
  options.base.pipeline_size = ranks;
  options.base.pipeline_stages = stages;
  options.base.pipeline_schedule = schedule;
  options.base.sync = SyncMode::kLast;
  options.fixed.sync = options.fixed.offload = true;
  options.reshard = {true, {Reshard::Kind::kNever, 0}};
  options.threads = 2;
  return options;
}

Piped DrawPiped(std::mt19937& random, int most_blocks, int most_rounds) {
  Piped p;
  const std::int64_t stages = Draw(random, 1, 2);
  const std::int64_t ranks = stages > 1 ? 2 : std::int64_t{2} << Draw(random, 0, 1);
  PipelineSchedule schedule = stages == 1 ? static_cast<PipelineSchedule>(Draw(random, 0, 1))
                                          : static_cast<PipelineSchedule>(Draw(random, 2, 3));
  if (Draw(random, 0, 1) == 0) {  // backward split
    constexpr auto kFirst = static_cast<int>(PipelineSchedule::kInterleavedZeroBubble);
    schedule = static_cast<PipelineSchedule>(kFirst + (stages > 1 ? Draw(random, 0, 2) : 0));
  }
  // The last stage has a block beside the end of the model, which has no op.
  const std::int64_t least = 2 * ranks * stages - 2;
  p.blocks = static_cast<int>(Draw(random, least, least + most_blocks));
  do {
    p.job = DrawCase(random, p.blocks);
  } while (p.job.cluster.RankCount() % ranks != 0);
  p.job.kernels = FindKernelSet("torch-eager", "test");
  p.job.profile = DefaultProfile(p.job.cluster.gpu, p.job.kernels.name);
  p.options = PipelineSearch(ranks, stages, schedule);
  const std::int64_t least_rounds = schedule == PipelineSchedule::kDualPipeV ? 2 : 1;
  p.job.job.global_batch =
      p.job.cluster.RankCount() / ranks * ranks * Draw(random, least_rounds, most_rounds);
  return p;
}

struct Drawn {
  Plan plan;
  double seconds = 0;
  Bytes memory;
};

// Adds the outcome, unless a unit is of two stages of a rank.
void Simulate(const Piped& p, const Plan& plan, std::vector<Drawn>& all) {
  try {
    const SimulationResult result =
        SimulateStages(LowerAndVerifyStages(p.job, plan), p.job, kNoLimit);
    all.push_back({plan, ToSeconds(result.step_time).value, result.memory.Needs()});
  } catch (const InputError& error) {
    CHECK(std::string(error.what()).find("units inside of one stage each") != std::string::npos);
  }
}

// With any of its shard sizes and micro-batches, units and checkpointing.
Plan DrawPlan(std::mt19937& random, const Piped& p, const std::vector<OuterChoice>& outer) {
  Plan plan = p.options.base;
  SetOuter(outer[static_cast<std::size_t>(Draw(random, 0, std::ssize(outer) - 1))], plan);
  plan.units = UnitsOf(p.blocks, static_cast<unsigned>(Draw(random, 0, (1 << (p.blocks - 1)) - 1)),
                       {Reshard::Kind::kNever, 0});
  for (int b = 0; b < p.blocks && !SplitsBackward(plan.pipeline_schedule); ++b) {
    if (const std::int64_t kind = Draw(random, 0, 3); kind < 2) {
      plan.recompute.push_back({"block" + std::to_string(b),
                                kind == 0 ? RecomputeKind::kFull : RecomputeKind::kSelective,
                                Draw(random, 1, 3)});
    }
  }
  return plan;
}

const Candidate& CandidateOf(const SearchResult& result, const Plan& plan) {
  return *std::find_if(result.candidates.begin(), result.candidates.end(), [&](const Candidate& c) {
    return c.plan.shard_size == plan.shard_size && c.plan.micro_batch == plan.micro_batch;
  });
}

TEST_CASE("No random plan with a pipeline is faster or smaller than the bounds") {
  const int jobs = IsDeep() ? 100 : testing::kHasSanitizer ? 3 : 20;
  const int plans = IsDeep() ? 1000 : testing::kHasSanitizer ? 20 : 50;
  double tightest = INFINITY, leanest = INFINITY;
  int fitting = 0;
  for (int i = 0; i < jobs; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(3000 + i));
    Piped p = DrawPiped(random, 6, 4);
    p.options.effort = 0;
    const Space space = MakeSpace(p.job, p.options);
    std::vector<Drawn> all;
    for (int n = 0; n < plans; ++n) {
      Simulate(p, DrawPlan(random, p, space.outer), all);
    }
    REQUIRE_FALSE(all.empty());
    p.options.memory_limit = all[0].memory;
    for (const Drawn& o : all) {
      p.options.memory_limit = Draw(random, 0, 3) == 0 ? std::max(p.options.memory_limit, o.memory)
                                                       : p.options.memory_limit;
    }
    const SearchResult result = Search(p.job, p.options);
    for (const Drawn& o : all) {
      const Candidate& known = CandidateOf(result, o.plan);
      CHECK(known.memory_bound <= o.memory);
      leanest = std::min(leanest, Ratio(o.memory, known.memory_bound) - 1);
      if (o.memory <= p.options.memory_limit) {
        ++fitting;
        CAPTURE(o.plan.shard_size);
        CAPTURE(o.plan.micro_batch);
        CHECK(known.bound.value <= o.seconds);
        CHECK(result.lower_bound.value <= o.seconds);
        tightest = std::min(tightest, o.seconds / known.bound.value - 1);
      }
    }
  }
  CHECK(fitting > jobs * plans / 4);  // not vacuous
  MESSAGE(fitting << " plans that fit, of " << jobs * plans
                  << "; their bound is below the nearest by " << tightest << ", that of memory by "
                  << leanest);
}

// All shard sizes, micro-batches and partitions, and so many of the first blocks checkpointed.
template <class F>
void ForEachPlan(const Piped& p, const Space& space, F f) {
  for (const OuterChoice& outer : space.outer) {
    for (unsigned cuts = 0; cuts < (1U << (p.blocks - 1)); ++cuts) {
      const int most = SplitsBackward(p.options.base.pipeline_schedule) ? 0 : p.blocks;
      for (int checkpointed = 0; checkpointed <= most; ++checkpointed) {
        Plan plan = p.options.base;
        SetOuter(outer, plan);
        plan.units = UnitsOf(p.blocks, cuts, {Reshard::Kind::kNever, 0});
        for (int b = 0; b < checkpointed; ++b) {
          plan.recompute.push_back({"block" + std::to_string(b), RecomputeKind::kFull, 1});
        }
        f(plan);
      }
    }
  }
}

TEST_CASE("A search over pipelines is as fast as enumeration, or within the gap it proves") {
  const int count = IsDeep() ? 100 : testing::kHasSanitizer ? 1 : 4;
  int equal = 0, proven = 0;
  double worst = 0;
  for (int i = 0; i < count; ++i) {
    CAPTURE(i);
    std::mt19937 random(static_cast<unsigned>(4000 + i));
    Piped p = DrawPiped(random, 1, 2);
    const Space space = MakeSpace(p.job, p.options);
    std::vector<Drawn> all;
    ForEachPlan(p, space, [&](const Plan& plan) { Simulate(p, plan, all); });
    const auto [least, most] = std::minmax_element(
        all.begin(), all.end(), [](const Drawn& x, const Drawn& y) { return x.memory < y.memory; });
    p.options.memory_limit =
        least->memory + Bytes((most->memory - least->memory).value * Draw(random, 1, 4) / 3);
    double best = INFINITY;
    for (const Drawn& o : all) {
      best = o.memory <= p.options.memory_limit ? std::min(best, o.seconds) : best;
    }
    const SearchResult result = Search(p.job, p.options);
    REQUIRE(result.is_feasible);
    CHECK(result.lower_bound.value <= best * (1 + 1e-9));
    CHECK(result.best.step_time.value * (1 - result.proven_gap) <= best * (1 + 1e-9));
    const double slower = result.best.step_time.value / best - 1;
    equal += slower <= p.options.tie ? 1 : 0;
    proven += result.proven_gap <= p.options.tie ? 1 : 0;
    worst = std::max(worst, slower);
  }
  CHECK(worst <= 0.05);
  MESSAGE("within the tie in " << equal << " of " << count << " jobs, at worst slower by " << worst
                               << "; " << proven << " proven within the tie");
}

// Where arithmetic is all that takes time, the last rank's waiting is the bubble: (P - 1) / V
// forwards and backwards beside as many as there are micro-batches.
TEST_CASE("The bounds of equal stages count the bubble and what is in flight") {
  for (const std::int64_t stages : {1, 2}) {
    std::mt19937 random(7);
    testing::ChainSpec spec;
    spec.blocks = 22;  // with both ends 24: 4 ranks of 6 layers
    spec.linears = 2;
    spec.width = spec.stem = 4096;
    spec.rows = 1 << 16;
    Piped p;
    p.job = DrawCase(random, 2);
    p.job.model = {testing::ChainModel(spec)};
    p.job.kernels = FindKernelSet("torch-eager", "test");
    p.job.cluster = LoadCluster("dgx-h100", 1, 4);
    p.job.profile = DefaultProfile(p.job.cluster.gpu, p.job.kernels.name);
    p.job.job.sequence_length = spec.rows;
    p.job.job.clip_gradients = true;
    p.job.job.global_batch = 8;
    p.options = PipelineSearch(
        4, stages, stages == 1 ? PipelineSchedule::k1F1B : PipelineSchedule::kInterleaved1F1B);
    p.options.fixed.micro_batch = p.options.fixed.recompute = true;
    const SearchResult result = Search(p.job, p.options);
    REQUIRE(result.is_feasible);
    const Candidate& chosen = result.candidates[result.best.index];
    CHECK(chosen.bound <= chosen.step_time);
    CHECK(chosen.bound.value > 0.88 * chosen.step_time.value);
    CAPTURE(stages);
    // 3 of 11 parts of the step by 1F1B, 1.5 of 9.5 with two stages each; somewhat more, as ranks
    // at the ends have 5 blocks and those between 6.
    const double bubble = result.best.bubble.value / result.best.step_time.value;
    const double equal = stages == 1 ? 3.0 / 11 : 1.5 / 9.5;
    CHECK(bubble > 0.95 * equal);
    CHECK(bubble < 1.3 * equal);
    CHECK(chosen.memory_bound <= chosen.memory);
    CHECK(Ratio(chosen.memory_bound, chosen.memory) > (stages == 1 ? 0.7 : 0.53));
  }
}

// By hand: by 1F1B rank r of 4 has 4 - r micro-batches between forward and backward, and the last
// one computes its loss meanwhile. By GPipe, once gradients are there, all but one of 6; the losses
// are over by then.
TEST_CASE("Parts of a pipeline count what is in flight") {
  std::mt19937 random(7);
  Piped p;
  p.job = DrawCase(random, 2);
  p.job.cluster = LoadCluster("dgx-h100", 1, 4);
  p.job.kernels = FindKernelSet("torch-eager", "test");
  p.job.job.sequence_length = 512;
  p.job.model = {LoadModel("llama-3-8b", {.sequence_length = 512})};
  Workers workers(p.job, 1);
  const auto parts_of = [&](PipelineSchedule schedule) {
    p.options = PipelineSearch(4, 1, schedule);
    p.options.fixed.micro_batch = p.options.fixed.recompute = true;
    p.job.job.global_batch = 6;
    return StageParts(p.job, p.options, MakeSpace(p.job, p.options), workers);
  };
  const auto kept = [](const StagePart& part) {
    return part.measured.at(1).classes.front().costs.front().kept_bytes;
  };
  const std::vector<StagePart> by_turns = parts_of(PipelineSchedule::k1F1B);
  const std::vector<StagePart> gpipe = parts_of(PipelineSchedule::kGPipe);
  const double one = kept(by_turns[3]);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    CAPTURE(rank);
    CHECK(kept(by_turns[rank]) / one == doctest::Approx(4 - static_cast<double>(rank)));
    CHECK(kept(gpipe[rank]) / one == doctest::Approx(5));
    CHECK((by_turns[rank].measured.at(1).tail_bytes > 0) == (rank == 3));
    CHECK(gpipe[rank].measured.at(1).tail_bytes == 0);
  }
  // 8, 9 and 8 blocks, the first with the embedding.
  const double layer = by_turns[2].bubble.at(1) - by_turns[1].bubble.at(1);
  CHECK(by_turns[0].bubble.at(1) == 0);
  CHECK((by_turns[3].bubble.at(1) - by_turns[2].bubble.at(1)) / layer ==
        doctest::Approx(8.0 / 9).epsilon(0.02));
}

TEST_CASE("Many micro-batches are told from fewer") {
  for (const std::int64_t stages : {1, 2}) {
    std::mt19937 random(9);
    Piped p;
    do {
      p.job = DrawCase(random, 6);
    } while (p.job.cluster.RankCount() != 4);
    p.options = PipelineSearch(
        2, stages, stages == 1 ? PipelineSchedule::k1F1B : PipelineSchedule::kInterleaved1F1B);
    p.job.kernels = FindKernelSet("torch-eager", "test");
    p.job.profile = DefaultProfile(p.job.cluster.gpu, p.job.kernels.name);
    p.job.job.global_batch = 2 * 64;
    Plan plan = p.options.base;
    plan.shard_size = 2;
    plan.accumulation = 64;
    plan.units = UnitsOf(6, 0b11111, {Reshard::Kind::kNever, 0});
    const SimulationResult exact =
        SimulateStages(LowerAndVerifyStages(p.job, plan), p.job, kNoLimit);
    const auto told = Evaluator(p.job).Try(plan);
    CHECK(Ratio(told.step_time, ToSeconds(exact.step_time)) == doctest::Approx(1).epsilon(0.01));
    CHECK(Ratio(told.bubble, ToSeconds(exact.bubble)) == doctest::Approx(1).epsilon(0.03));
    CHECK(Ratio(told.Memory(), exact.memory.Needs()) == doctest::Approx(1).epsilon(0.0005));
  }
}

TEST_CASE("Micro-batches that no schedule takes are no choice") {
  std::mt19937 random(8);
  Piped p;
  p.job = DrawCase(random, 8);
  p.job.cluster = LoadCluster("dgx-h100", 1, 8);
  p.options = PipelineSearch(4, 1, PipelineSchedule::k1F1B);
  p.job.job.global_batch = 2 * 8;  // 8 for each of two data-parallel ranks: 8 of 1, 4 of 2
  for (const OuterChoice& outer : MakeSpace(p.job, p.options).outer) {
    CHECK(outer.micro_batch <= 2);
    CHECK(outer.shard_size * outer.replicate_size == 2);
  }
  p.job.job.global_batch = 2 * 3;
  CHECK_THROWS_WITH_AS((void)MakeSpace(p.job, p.options),
                       doctest::Contains("expected 4 micro-batches or more"), InputError);
}

}  // namespace
}  // namespace shardwright
