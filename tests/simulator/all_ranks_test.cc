// The simulation of all ranks against the rank simulated alone (symmetric ranks must give the same
// spans), against the slow one of reference_ranks.h, and against times worked out by hand
// (stragglers).

#include "tests/simulator/all_ranks.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/builder.h"
#include "simulator/engine.h"
#include "tests/simulator/random_program.h"
#include "tests/simulator/reference_ranks.h"

namespace shardwright {
namespace {

TEST_CASE("Symmetric ranks: every rank has exactly the spans of the rank simulated alone") {
  EngineWorkspace workspace;
  for (const bool contention : {false, true}) {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
      CAPTURE(seed);
      CAPTURE(contention);
      const RandomProgram random = MakeRandomProgram(seed, {3, 2, 5, contention});
      EngineOptions engine;
      engine.contention = contention;
      std::vector<Span> spans;
      const EngineResult alone =
          RunEngineWithSpans(random.program, random.prices, engine, workspace, spans);

      const std::vector<RankProgram> ranks(16, {&random.program, &random.prices, 1});
      AllRanksOptions options;
      options.contention = contention;
      // The steps behind the last one compared slow its end down.
      options.steps = std::min(alone.steps + 2, engine.max_steps);
      const AllRanksResult all = RunAllRanks(ranks, options);
      CHECK(all.init == alone.init);
      CHECK(all.step_times[0] == alone.first.time);
      if (alone.is_steady) {
        CHECK(all.step_times[static_cast<std::size_t>(alone.steps) - 1] == alone.steady.time);
      }
      std::map<std::pair<std::uint32_t, std::uint32_t>, Span> steps;
      for (const Span& span : spans) {
        if (span.body != BodyKind::kInit) {
          steps[{span.step, span.op.value}] = span;
        }
      }
      std::size_t compared = 0;
      for (Span span : all.spans) {
        const auto it = steps.find({span.step, span.op.value});
        if (span.body == BodyKind::kInit || it == steps.end()) {
          continue;
        }
        span.rank = Rank(0u);
        const Span& expected = it->second;
        CHECK(span.issue_begin.value == expected.issue_begin.value);
        CHECK(span.issued.value == expected.issued.value);
        CHECK(span.issue_end.value == expected.issue_end.value);
        CHECK(span.ready.value == expected.ready.value);
        CHECK(span.arrival.value == expected.arrival.value);
        CHECK(span.start.value == expected.start.value);
        CHECK(span.end.value == expected.end.value);
        ++compared;
      }
      CHECK(compared == 16 * steps.size());
    }
  }
}

TEST_CASE("Ranks that differ: every span is that of the slow simulation of all ranks") {
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    CAPTURE(seed);
    AllRanksOptions options;
    options.contention = seed % 4 != 0;
    const RandomProgram random = MakeRandomProgram(seed, {4, 2, 5, options.contention});
    std::vector<RankProgram> ranks(16, {&random.program, &random.prices, 1});
    for (std::size_t r = 0; r < ranks.size(); r += 1 + seed % 5) {
      ranks[r].slowdown = 1 + 0.1 * static_cast<double>((r * 7 + seed) % 9);
    }
    const AllRanksResult expected = RunReferenceRanks(ranks, options);
    const AllRanksResult result = RunAllRanks(ranks, options);
    CHECK(result.init == expected.init);
    CHECK(result.step_times == expected.step_times);
    CHECK(result.spans == expected.spans);
  }
}

// One compute op and one all-reduce of all ranks behind it, per step.
struct Chain {
  Program program;
  PriceTable prices;
};

Chain MakeChain(std::int64_t ranks) {
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
  const OpId work = step.Add({compute_id});
  step.AfterSlot(0);
  const OpId sync = step.Add({reduce_id});
  step.After(work);
  step.SetCarry(0, sync);
  step.Finish();
  chain.prices.prices.resize(2);
  chain.prices.prices[compute_id.value].duration = SimTime(1000);
  chain.prices.prices[reduce_id.value].duration = SimTime(300);
  return chain;
}

TEST_CASE("A straggler sets the pace, and the others wait for it") {
  // By hand: all ranks compute for 1000, the straggler for 1500; the all-reduce starts at 1500 and
  // takes 300, so each step takes 1800 and the others wait 500 for a peer.
  const Chain chain = MakeChain(4);
  std::vector<RankProgram> ranks(4, {&chain.program, &chain.prices, 1});
  ranks[2].slowdown = 1.5;
  const AllRanksResult result = RunAllRanks(ranks, {});
  CHECK(result.step_times == std::vector<SimTime>(3, SimTime(1800)));
  for (const Span& span : result.spans) {
    if (span.stream == Stream::kReplicate && span.step == 0) {
      CHECK(span.arrival.value == (span.rank == Rank(2u) ? 1500 : 1000));
      CHECK(span.start.value == 1500);
      CHECK(span.end.value == 1800);
    }
  }
}

TEST_CASE("Groups that do not tile the ranks, and too many ranks, are refused") {
  const Chain chain = MakeChain(4);
  const std::vector<RankProgram> six(6, {&chain.program, &chain.prices, 1});
  CHECK_THROWS_WITH_AS((void)RunAllRanks(six, {}),
                       "group world: got 4 ranks, 1 apart, expected groups that tile 6 ranks",
                       InputError);
  const std::vector<RankProgram> many(65, {&chain.program, &chain.prices, 1});
  CHECK_THROWS_WITH_AS((void)RunAllRanks(many, {}),
                       "ranks: got 65, expected 1 to 64 ranks simulated one by one", InputError);
}

}  // namespace
}  // namespace shardwright
