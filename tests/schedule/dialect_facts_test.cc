// The table of dialects against what the rules of each make of a plan.

#include "schedule/dialect_facts.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/plan_names.h"
#include "schedule/wrap.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model

constexpr std::int64_t kRanks = 4;

Plan PlanOf(Dialect dialect) {
  Plan plan = ChainPlan({}, dialect, 1);
  plan.units = Wrap(ChainModel({}), ParseWrap(DefaultWrap(dialect), "test"), {}, dialect, "test");
  const bool shards = FactsOf(dialect).mesh != MeshChoice::kReplicas;
  (shards ? plan.shard_size : plan.replicate_size) = kRanks;
  plan.accumulation = 2;
  return plan;
}

bool IsValid(const Plan& plan) {
  try {
    ValidatePlan(ChainModel({}), ChainJob({}, kMixed), plan, "test");
  } catch (const InputError&) {
    return false;
  }
  return true;
}

template <class Check>
void ForEachDialect(const Check& check) {
  for (std::size_t d = 0; d < kDialectNames.size(); ++d) {
    const auto dialect = static_cast<Dialect>(d);
    CAPTURE(NameOf(dialect));
    const Plan plan = PlanOf(dialect);
    REQUIRE(IsValid(plan));
    check(FactsOf(dialect), plan);
  }
}

TEST_CASE("DialectFacts: choices that a dialect does not have are refused") {
  ForEachDialect([](const DialectFacts& facts, Plan plan) {
    const Plan before = plan;
    plan.sync = SyncMode::kLast;
    CHECK(IsValid(plan) == facts.skips_sync);
    for (bool Offload::*part : {&Offload::optimizer, &Offload::moments}) {
      plan = before;
      plan.offload.*part = true;
      CHECK(IsValid(plan) == facts.offload.*part);
    }
    plan = before;
    plan.offload.parameters = true;
    plan.sync = facts.skips_sync ? SyncMode::kLast : SyncMode::kEvery;
    CHECK(IsValid(plan) == facts.offload.parameters);
    plan = before;
    plan.units.front().forward_prefetch = {plan.units.back().name};
    CHECK((!IsValid(plan) || facts.has_groups));
    plan = before;
    plan.in_flight = 3;
    CHECK(IsValid(plan) == (facts.early_gathers == EarlyGathers::kInFlight));
    plan = before;
    plan.forward_prefetch = true;
    CHECK(IsValid(plan) == (facts.early_gathers == EarlyGathers::kSwitches));
    plan = before;
    std::swap(plan.shard_size, plan.replicate_size);
    CHECK((IsValid(plan) || facts.mesh != MeshChoice::kAny));
  });
}

TEST_CASE("DialectFacts: what is resident and what travels, as lowered") {
  ForEachDialect([](const DialectFacts& facts, const Plan& plan) {
    const Program program = LowerChain({}, plan, kMixed);
    std::size_t over_shards = 0;
    for (const Group& group : program.groups) {
      over_shards += group.size == plan.shard_size && group.stride == 1 ? 1 : 0;
    }
    CHECK((over_shards > 1) == (plan.shard_size > 1 && !facts.one_communicator));
    CHECK((program.memory == MemoryRegime::kArena) == facts.has_arena);
    std::int64_t resident = 0;  // bytes of parameters behind init
    for (const MemoryPoint& point : program.init.points) {
      const Buffer& buffer = program.buffers[point.buffer.value];
      if (buffer.category == Category::kParameterShard ||
          buffer.category == Category::kUnshardedParameter) {
        resident += point.kind == PointKind::kFree ? -buffer.size.value : buffer.size.value;
      }
    }
    const std::int64_t all = CountParameters(ChainModel({}));
    CHECK((resident >= all * SizeOf(kMixed.param)) == facts.whole_parameters);
  });
}

}  // namespace
}  // namespace shardwright
