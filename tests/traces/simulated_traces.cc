#include "tests/traces/simulated_traces.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "simulator/costs/price.h"
#include "simulator/engine.h"
#include "simulator/memory.h"
#include "tests/schedule/random_plan.h"
#include "tests/simulator/all_ranks.h"

namespace shardwright::testing {
namespace {

std::int64_t Between(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// 0, below a nanosecond, or up to 30 us.
SimTime DrawTime(std::mt19937& random) {
  switch (Between(random, 0, 5)) {
    case 0:
      return SimTime(0);
    case 1:
      return SimTime(Between(random, 1, 900));
    default:
      return SimTime(Between(random, 1, 30'000'000));
  }
}

PriceTable DrawPrices(std::mt19937& random, const Program& program) {
  PriceTable prices;
  prices.wake_up = DrawTime(random);
  for (const OpShape& shape : program.shapes) {
    Price price;
    price.duration = shape.code == OpCode::kStreamWait ? SimTime(0) : DrawTime(random);
    if (!InfoOf(shape.code).runs_on_host) {
      price.issue = DrawTime(random);
      price.first_launch = SimTime(Between(random, 0, price.issue.value));
    }
    prices.prices.push_back(price);
  }
  return prices;
}

}  // namespace

SimulatedTrace DrawTrace(std::mt19937& random, bool all_ranks) {
  const RandomCase drawn = DrawCase(random);
  SimulatedTrace result;
  result.program = LowerCase(drawn);
  result.description = drawn.description;
  const PriceTable prices = DrawPrices(random, result.program);
  std::vector<Span>& spans = result.trace.spans;
  if (all_ranks) {
    std::vector<RankProgram> ranks(
        static_cast<std::size_t>(result.program.shard_size * result.program.replicate_size));
    for (RankProgram& rank : ranks) {
      rank = {&result.program, &prices, Between(random, 0, 3) == 0 ? 1.5 : 1.0};
    }
    AllRanksOptions options;
    options.contention = false;
    options.steps = 2;
    spans = RunAllRanks(ranks, options).spans;
    return result;
  }
  EngineOptions options;
  options.contention = false;
  EngineWorkspace workspace;
  (void)RunEngineWithSpans(result.program, prices, options, workspace, spans);
  AppendMemorySamples(result.program, spans, result.trace.memory);
  return result;
}

}  // namespace shardwright::testing
