// What releases of PyTorch do differently, and its loss scaler, against hand computation. The
// expected programs are those that ran beside each release (docs/conformance.md).

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

constexpr Precision kHalf{DType::kFp32, DType::kFp16, DType::kFp32};

// Group and bytes of what is all-reduced for the update.
std::vector<std::pair<std::string, std::int64_t>> SumsOfUpdate(const Program& p) {
  std::vector<std::pair<std::string, std::int64_t>> sums;
  for (const Op& op : p.step.ops) {
    const OpShape& shape = p.ShapeOf(op);
    if (op.phase == Phase::kOptimizer && shape.code == OpCode::kAllReduce) {
      sums.emplace_back(p.groups[shape.group.value].name, shape.bytes.value);
    }
  }
  return sums;
}

using Sums = std::vector<std::pair<std::string, std::int64_t>>;

// Three parameters, in the dtype of their shards; one number before torch 2.13.
TEST_CASE("Releases of torch: what clipping sums over the shards") {
  ChainSpec spec;
  spec.blocks = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  const auto clip = [](Job& job) { job.clip_gradients = true; };
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kMixed, clip)) == Sums{{"shard", 12}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kPure, clip)) == Sums{{"shard", 6}});
  plan.torch = TorchRelease::k2_8;
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kMixed, clip)) == Sums{{"shard", 4}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kPure, clip)) == Sums{{"shard", 2}});
}

// Backward of the root gathers layer 1 ahead, that of layer 1 layer 0, which then runs again. It
// stays, and its backward gathers block 0 ahead; or it is freed behind its second forward, which is
// also the last in the order, behind the root's: its backward gathers it again, and the root, which
// is there, ahead; then block 0 gathers itself.
TEST_CASE("Releases of torch: a unit that runs again before its backward") {
  ChainSpec spec;
  spec.blocks = 2;
  spec.linears = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.units[1].name = plan.units[1].modules[0] = "block1.lin0";
  UnitPlan last = plan.units[1];
  last.name = last.modules[0] = "block1.lin1";
  plan.units.insert(plan.units.begin() + 2, last);
  plan.recompute = {{"block1", RecomputeKind::kFull, 1}};
  const auto gathered = [&](TorchRelease release) {
    plan.torch = release;
    const Program p = LowerChain(spec, plan, kMixed);
    std::vector<std::string> units;
    for (const Op& op : p.step.ops) {
      if (p.ShapeOf(op).code == OpCode::kAllGather && op.phase != Phase::kForward) {
        units.push_back(p.units[op.subject].name);
      }
    }
    return units;
  };
  const std::string one = "block1.lin1", zero = "block1.lin0";
  CHECK(gathered(TorchRelease::k2_13) == std::vector<std::string>{one, zero, "block0"});
  CHECK(gathered(TorchRelease::k2_8) == std::vector<std::string>{one, zero, zero, "block0"});
}

// The chain, and in its root a layer that nothing calls.
Model ChainWithSpare(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  const ModuleId spare = AddModule(model, ModuleId(0), "spare", "Linear");
  AddParam(model, spare, "weight", {spec.width, spec.width});
  ValidateModel(model, "test");
  return model;
}

// Forward gathers root, blocks 0 and 2, and the unit of block 1 and the spare layer. The end of the
// model's forward frees that, and the hook there gathers it again; without such an end it is there
// until its backward is over. Only the weights of blocks and root have gradients.
TEST_CASE("Releases of torch: a unit of two modules of which nothing calls one") {
  ChainSpec spec;
  spec.blocks = 3;
  const Model model = ChainWithSpare(spec);
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.units[1].modules = {"block1", "spare"};
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  Job job = ChainJob(spec, kMixed);
  for (const TorchRelease release : {TorchRelease::k2_13, TorchRelease::k2_8}) {
    plan.torch = release;
    const Program p = Lower({model, kernels, job, plan});
    CHECK(Verify(p).empty());
    CHECK(Count(p, OpCode::kAllGather) == (release == TorchRelease::k2_13 ? 7 : 6));
    CHECK(Count(p, OpCode::kReduceScatter) == 4);
  }
  // Forward only: freed and gathered again, or there from the first pass on, as the root is.
  job.mode = JobMode::kForward;
  const Program there = Lower({model, kernels, job, plan});
  CHECK(Verify(there).empty());
  CHECK(Count(there, OpCode::kAllGather) == 2);
  plan.torch = TorchRelease::k2_13;
  CHECK(Count(Lower({model, kernels, job, plan}), OpCode::kAllGather) == 3);
}

TEST_CASE("Releases of torch: what fully_shard of 2.6 cannot do") {
  ChainSpec spec;
  spec.blocks = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.units.back().reshard.kind = Reshard::Kind::kAlways;
  plan.torch = TorchRelease::k2_8;
  CHECK_NOTHROW((void)LowerChain(spec, plan, kMixed));
  plan.torch = TorchRelease::k2_6;
  CHECK_THROWS_WITH_AS((void)LowerChain(spec, plan, kMixed),
                       "plan: units[2].reshard: got a root that is resharded, expected \"never\", "
                       "or torch 2.8 or later; fully_shard keeps its root until then",
                       InputError);
  plan.units.back().reshard.kind = Reshard::Kind::kNever;
  // The end of its backward leaves alone what is sharded: a unit that nothing calls, and one whose
  // last module reaches no loss, with the gradient of its first.
  UnitPlan spare = plan.units[0];
  spare.name = spare.modules[0] = "spare";
  plan.units.insert(plan.units.begin(), spare);
  plan.accumulation = 2;
  plan.sync = SyncMode::kLast;
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kMixed);
  CHECK_NOTHROW((void)Lower({ChainWithSpare(spec), kernels, job, plan}));
  plan.torch = TorchRelease::k2_8;
  CHECK_THROWS_AS((void)Lower({ChainWithSpare(spec), kernels, job, plan}), InputError);
}

TEST_CASE("Releases of torch: only PyTorch's own dialects have them") {
  ChainSpec spec;
  Plan plan = ChainPlan(spec, Dialect::kNative, 4);
  plan.torch = TorchRelease::k2_8;
  CHECK_THROWS_WITH_AS(ValidatePlan(ChainModel(spec), ChainJob(spec, kMixed), plan, "plan"),
                       "plan: torch: got an option of dialect fsdp2, fsdp1 and ddp in a plan of "
                       "dialect native, expected its default",
                       InputError);
}

// torch's scaler asks all gradients, and sums one fp32 flag, before they are clipped: over the
// shards where they are DTensors, over all ranks in FSDP1, and there not under a fused optimizer,
// which asks on its own. Three parameters are clipped by three numbers, or one in FSDP1.
TEST_CASE("fp16: the flag of torch's loss scaler") {
  ChainSpec spec;
  spec.blocks = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 2);
  plan.replicate_size = 2;
  const auto clip = [](Job& job) { job.clip_gradients = true; };
  const auto fused = [](Job& job) { job.optimizer.impl = OptimizerImpl::kFused; };
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf)) == Sums{{"shard", 4}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf, clip)) == Sums{{"shard", 4}, {"shard", 12}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf, fused)) == Sums{{"shard", 4}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kMixed)).empty());
  plan.dialect = Dialect::kFsdp1;
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf)) == Sums{{"world", 4}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf, clip)) == Sums{{"world", 4}, {"shard", 4}});
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf, fused)).empty());
  plan.offload.parameters = true;
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf, clip)) == Sums{{"world", 4}, {"shard", 4}});
  // Replicas alone, and all ranks in one group.
  plan.offload.parameters = false;
  plan.shard_size = 1;
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf)) == Sums{{"replicate", 4}});
  plan.shard_size = 4;
  plan.replicate_size = 1;
  CHECK(SumsOfUpdate(LowerChain(spec, plan, kHalf)) == Sums{{"shard", 4}});
}

}  // namespace
}  // namespace shardwright
