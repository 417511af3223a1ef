// Programs of our own dialect against hand computation: docs/lowering.md, section native.

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/lower/products.h"
#include "schedule/print.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

TEST_CASE("Native: ops that share a weight add up a later micro-batch's gradient apart") {
  ChainSpec spec;
  spec.blocks = 3;
  Model model = ChainModel(spec);
  Plan plan = ChainPlan({.blocks = 0}, Dialect::kNative, 4);  // the root alone
  plan.accumulation = 3;
  const Job job = ChainJob(spec, kMixed);
  const auto lower = [&] {
    Program p = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
    CHECK(Verify(p).empty());
    return p;
  };
  plan.sync = SyncMode::kLast;
  CHECK(Count(lower(), OpCode::kAccumulateGrad) == 0);
  model.params[3].tied_to = ParamId(1);  // blocks 0 and 2
  const Program p = lower();
  CHECK(Count(p, OpCode::kAccumulateGrad) == 2);  // in the second micro-batch and the third
  const std::int64_t block = spec.width * spec.width * 4;
  const std::int64_t unit = 2 * block + spec.width * spec.stem * 4;  // 17 times 256 bytes per rank
  const auto gradients = [&](const std::string& name) {
    return Of(AliveAt(p, name), Category::kUnshardedGradient);
  };
  CHECK(gradients("mb0.block1.lin0.bwd") == unit);
  CHECK(gradients("mb1.fwd.copy_h2d") == unit);
  CHECK(gradients("mb1.block1.lin0.bwd") == unit + block);
  CHECK(gradients("mb1.stem.bwd") == unit);
  plan.sync = SyncMode::kEvery;
  CHECK(Count(lower(), OpCode::kAccumulateGrad) == 0);
}

TEST_CASE("Native gathers again what backward reads: not the weight of the model's first op") {
  ChainSpec spec;  // four blocks; the last one stays gathered
  for (const Reshard reshard :
       {Reshard{Reshard::Kind::kAlways, 0}, Reshard{Reshard::Kind::kToGroup, 2}}) {
    Plan plan = ChainPlan(spec, Dialect::kNative, 4);
    UnitPlan stem = plan.units.front();
    stem.name = "stem";
    stem.modules = {"stem"};
    stem.reshard = reshard;
    plan.units.insert(plan.units.begin(), stem);
    CHECK(Count(LowerChain(spec, plan, kMixed), OpCode::kAllGather) == 5 + 3);
  }
}

// Nothing moves but the gradients between replicas: one rank's shard and gradient are whole.
TEST_CASE("Native: one rank per shard computes on its shard and keeps its gradient") {
  const ChainSpec spec;
  Plan plan = ChainPlan(spec, Dialect::kNative, 1);
  for (const std::int64_t replicas : {1, 3}) {
    plan.replicate_size = replicas;
    for (const bool clips : {false, true}) {
      plan.accumulation = 2;
      plan.sync = SyncMode::kLast;
      Job job = ChainJob(spec, kAllFp32);
      job.clip_gradients = clips;
      const Program p = Lower({ChainModel(spec), FindKernelSet("torch-eager", "test"), job, plan});
      CAPTURE(Print(p));
      CHECK(Verify(p).empty());
      CHECK(Count(p, OpCode::kGatherCopyIn) == 0);
      CHECK(Count(p, OpCode::kGradStore) == 0);
      CHECK(Count(p, OpCode::kAllReduce) == (replicas > 1 ? spec.blocks + 1 : 0));
      const auto whole = [&](Category c) { return Of(AliveAt(p, "mb1.stem.bwd"), c); };
      CHECK(whole(Category::kUnshardedParameter) == 0);
      CHECK(whole(Category::kReduceScatter) == 0);
      CHECK(whole(Category::kShardedGradient) == 0);
    }
  }
}

TEST_CASE("Native: one rank per shard copies what it must cast, and what it must add up") {
  const ChainSpec spec;
  Plan plan = ChainPlan(spec, Dialect::kNative, 1);
  const int units = spec.blocks + 1;
  // bf16 parameters are made of fp32 shards; fp32 gradients stay.
  const Program cast = LowerChain(spec, plan, {DType::kFp32, DType::kBf16, DType::kFp32});
  CHECK(Count(cast, OpCode::kGatherCopyIn) >= units);
  CHECK(Count(cast, OpCode::kGradStore) == 0);
  // bf16 gradients become fp32.
  const Program rounded = LowerChain(spec, plan, {DType::kFp32, DType::kFp32, DType::kBf16});
  CHECK(Count(rounded, OpCode::kGatherCopyIn) == 0);
  CHECK(Count(rounded, OpCode::kGradStore) == units);
  // Every micro-batch's gradient is added to the first one's.
  plan.accumulation = 3;
  plan.sync = SyncMode::kEvery;
  CHECK(Count(LowerChain(spec, plan, kAllFp32), OpCode::kGradStore) == 2 * units);
}

// The update writes the whole shard: it may not run beside what still reads frozen parameters.
TEST_CASE("Native: a unit with frozen parameters is copied where updates run beside backward") {
  const ChainSpec spec;
  Model model = ChainModel(spec);
  model.params[1].trainable = false;                          // block 0's
  Plan plan = ChainPlan({.blocks = 0}, Dialect::kNative, 1);  // the root alone
  for (const bool clips : {false, true}) {
    Job job = ChainJob(spec, kAllFp32);
    job.clip_gradients = clips;
    const Program p = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
    CHECK(Verify(p).empty());
    CHECK((Count(p, OpCode::kGatherCopyIn) > 0) == !clips);
  }
}

TEST_CASE("Large products: those with half of the FLOPs, the first and the last of each unit") {
  // By hand: the stem has 1/8 of the FLOPs of a linear of a block, but is the only one of its unit.
  ChainSpec spec;
  spec.blocks = 2;
  spec.linears = 3;
  const Model model = ChainModel(spec);
  const Plan plan = ChainPlan(spec, Dialect::kNative, 4);
  const Job job = ChainJob(spec, kMixed);
  const LowerInput in{model, FindKernelSet("torch-eager", "test"), job, plan};
  const ModelAnalysis analysis = AnalyzeModel(in, "test");
  const LargeProducts found = FindLargeProducts(
      model, analysis, FindUnitSpans(in, analysis, ResolveUnits(model, plan, "test")));
  CHECK(found.any == std::vector<bool>(7, true));
  CHECK(found.first == std::vector<bool>{true, true, false, false, true, false, false});
  CHECK(found.last == std::vector<bool>{true, false, false, true, false, false, true});
}

}  // namespace
}  // namespace shardwright
