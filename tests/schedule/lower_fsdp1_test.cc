// FSDP1 programs against hand computation: docs/lowering.md, section fsdp1.

#include <array>
#include <cstdint>
#include <random>
#include <string>

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

// FLOPs of the backward ops of a step.
double BackwardFlops(const Program& program) {
  double flops = 0;
  for (const Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    for (std::uint32_t k = 0; op.phase == Phase::kBackward && k < shape.kernel_count; ++k) {
      flops += program.kernels[shape.kernel_begin + k].flops.value;
    }
  }
  return flops;
}

// Views of a flat parameter all need gradients when one of them is trainable. torch 2.13 counts as
// many FLOPs in backward as without frozen weights (FlopCounterMode; 11,904 for three MLPs and
// their ends, and 9,600 outside of FSDP1).
TEST_CASE("FSDP1 computes the weight gradients of frozen weights beside trainable ones") {
  ChainSpec spec;
  spec.blocks = 3;
  spec.linears = 2;
  spec.rows = 5;
  const auto flops = [&](Dialect dialect, const std::string& frozen) {
    Model model = ChainModel(spec);
    for (Parameter& param : model.params) {
      param.trainable = frozen.empty() || param.fqn.find(frozen) == std::string::npos;
    }
    const Job job = ChainJob(spec, kAllFp32);
    const Plan plan = ChainPlan(spec, dialect, 2);
    const Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
    CHECK(Verify(program).empty());
    return BackwardFlops(program);
  };
  // A weight gradient takes 2 * 5 * 64 * 64 FLOPs. The stem is the root's only parameter.
  const double one = 2.0 * 5 * 64 * 64;
  const double all = flops(Dialect::kFsdp2, "");
  CHECK(flops(Dialect::kFsdp1, "") == all);
  CHECK(flops(Dialect::kFsdp1, "lin0") == all);
  CHECK(flops(Dialect::kFsdp2, "lin0") == all - 3 * one);
  // All of a unit frozen: nothing is computed for it, under FSDP1 either.
  CHECK(flops(Dialect::kFsdp1, "block1") == flops(Dialect::kFsdp2, "block1"));
}

TEST_CASE("FSDP1 gradients count twice when the flat gradient is made") {
  std::mt19937 random(13);
  for (int trial = 0; trial < 30; ++trial) {
    ChainSpec spec;
    spec.blocks = 6;
    const std::int64_t w = std::int64_t{1} << std::uniform_int_distribution<int>(1, 4)(random);
    spec.width = 16 * std::uniform_int_distribution<std::int64_t>(1, 12)(random);
    const Precision precision =
        std::array{kAllFp32, kMixed, kPure}[static_cast<std::size_t>(trial % 3)];
    const std::int64_t size = SizeOf(precision.param);
    const std::int64_t n = spec.width * spec.width, stem = spec.width * spec.stem;
    CAPTURE(trial);
    const Program p = LowerChain(spec, ChainPlan(spec, Dialect::kFsdp1, w), precision);
    const Bytes64 alive = AliveAt(p, "mb0.block3.bwd.concat_grad");
    CHECK(Of(alive, Category::kUnshardedGradient) == 2 * size * n);
    // This unit's parameters, the prefetched next one's, and the root's.
    CHECK(Of(alive, Category::kUnshardedParameter) == size * (2 * n + stem));
    // The reduction: a copy in its dtype, and its shard where that does not stay as the gradient.
    const std::int64_t r = SizeOf(precision.reduce);
    CHECK(Of(AliveAt(p, "mb0.block3.bwd.reduce_scatter"), Category::kReduceScatter) ==
          (r != size ? n * r : 0) + (precision.reduce != precision.master ? n / w * r : 0));
  }
}

// As torch 2.13 does it (torch_fsdp1_random.py has these cases): the rate limiter calls the
// profiler where it finds an event in its queue. In a first step forward finds none, so the gather
// of a unit that runs again does, unless it was gathered ahead.
TEST_CASE("FSDP1: units inside of what is recomputed selectively") {
  ChainSpec spec;
  spec.linears = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 2);
  plan.recompute = {{"block1", RecomputeKind::kSelective, 2}};
  plan.units[1].name = plan.units[1].modules[0] = "block1.lin0";
  (void)LowerChain(spec, plan, kMixed);  // "pre": gathered ahead
  plan.backward_prefetch = BackwardPrefetch::kNone;
  CHECK_THROWS_WITH_AS(
      (void)LowerChain(spec, plan, kMixed),
      "plan.recompute[0].kind: got \"selective\", expected \"full\", or no unit inside of "
      "\"block1\"; unit \"block1.lin0\" is inside, and torch's selective checkpoint fails on its "
      "hooks: profiler._record_function_enter_new encountered during backward but not found in "
      "storage",
      InputError);
  Plan unlimited = plan;
  unlimited.limit_all_gathers = false;
  (void)LowerChain(spec, unlimited, kMixed);
  unlimited.forward_prefetch = true;  // block 1's own hooks gather block 2
  (void)LowerChain(spec, unlimited, kMixed);
  unlimited.recompute[0].module = "block3";  // gathered from outside, and behind it is nothing
  unlimited.units[3].name = unlimited.units[3].modules[0] = "block3.lin0";
  CHECK_THROWS_WITH_AS(
      (void)LowerChain(spec, unlimited, kMixed),
      "plan.recompute[0].kind: got \"selective\", expected \"full\", or no unit inside of "
      "\"block3\"; unit \"block3.lin0\" is inside, and torch's selective checkpoint fails on its "
      "hooks: c10d._allgather_base_ encountered during backward but not found in storage",
      InputError);
  Plan replicas = plan;  // NO_SHARD frees nothing that could be waited for
  replicas.shard_size = 1;
  replicas.replicate_size = 2;
  (void)LowerChain(spec, replicas, kMixed);
  plan.units[1].name = plan.units[1].modules[0] = "block1.lin1";  // its backward has begun by then
  (void)LowerChain(spec, plan, kMixed);
}

// torch's checkpoint stops when it has made again as much as forward kept, also of a part that
// reaches no loss (torch_fsdp1_random.py has such a case): the unit there is gathered once more.
TEST_CASE("FSDP1 runs a dead part at the end of a region again") {
  ChainSpec spec;
  spec.blocks = 2;
  spec.linears = 2;
  Model model = ChainModel(spec);
  model.ops[3].inputs = model.ops[1].outputs;  // past the second op of block 0
  model.tensors[model.ops.back().outputs[0].value].role = TensorRole::kLoss;
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 2);
  plan.backward_prefetch = BackwardPrefetch::kNone;
  plan.units[0].name = plan.units[0].modules[0] = "block0.lin1";
  const auto gathers = [&] {
    const Program p =
        Lower({model, FindKernelSet("torch-eager", "test"), ChainJob(spec, kMixed), plan});
    CHECK(Verify(p).empty());
    return Count(p, OpCode::kAllGather);
  };
  CHECK(gathers() == 4);  // three in forward, and block 1 in backward
  plan.recompute = {{"block0", RecomputeKind::kFull, 1}};
  CHECK(gathers() == 5);
}

// The chain with block 0 run once before everything else, its result unused.
Model ChainWithDeadCall(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  ModelOp dead = model.ops[1];
  dead.name = "dead";
  dead.outputs = {TensorId(model.tensors.size())};
  model.tensors.push_back({TensorRole::kActivation, spec.rows * spec.width, false, ModelOpId(1)});
  model.ops[1].called_again = model.modules[dead.module.value].parent;  // the block
  model.ops.insert(model.ops.begin() + 1, dead);
  for (std::size_t i = 2; i < model.ops.size(); ++i) {
    model.tensors[model.ops[i].outputs[0].value].producer = ModelOpId(i);
  }
  model.tensors[model.ops.back().outputs[0].value].role = TensorRole::kLoss;
  return model;
}

// torch's hook waits for the gradient of the unit's first call, which is one of its own where the
// flat parameter is cast: nothing reduces the unit then (torch_fsdp1_random.py: its ranks differ).
TEST_CASE("FSDP1 refuses a cast unit whose first call has no gradient") {
  ChainSpec spec;
  const Model model = ChainWithDeadCall(spec);
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Plan plan = ChainPlan(spec, Dialect::kFsdp1, 2);
  CHECK(Verify(Lower({model, kernels, ChainJob(spec, kAllFp32), plan})).empty());
  CHECK_THROWS_WITH_AS(
      (void)Lower({model, kernels, ChainJob(spec, kMixed), plan}),
      "plan: units[0]: got unit \"block0\" called again after a call without a gradient, expected "
      "one whose first call has one, or parameters that are neither cast nor offloaded; torch "
      "would "
      "wait for the first call's gradient and not reduce the others; leave the parameters to a "
      "unit "
      "around it",
      InputError);
}

// The hook on what block 1 returned, as it was given it, gathers the block: forward 4, backward
// blocks 2, 1 and 0. Where the block is frozen, another hook on that tensor has ended it before.
TEST_CASE("FSDP1 gathers in backward what returns its input, and refuses that all-frozen") {
  ChainSpec spec;
  spec.blocks = 3;
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 2);
  plan.backward_prefetch = BackwardPrefetch::kNone;
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kAllFp32);
  for (const bool returns : {false, true}) {
    const Program p = Lower({ChainWithDroppedBlock(spec, returns), kernels, job, plan});
    CHECK(Verify(p).empty());
    CHECK(Count(p, OpCode::kAllGather) == (returns ? 7 : 6));
    CHECK(Count(p, OpCode::kReduceScatter) == 3);
  }
  Model frozen = ChainWithDroppedBlock(spec, true);
  frozen.params[frozen.ops[2].params[0].value].trainable = false;
  CHECK_THROWS_WITH_AS(
      (void)Lower({frozen, kernels, job, plan}),
      "plan: units[1]: got all-frozen unit \"block1\", whose module returns what it is given, "
      "expected a trainable parameter in it, or its parameters in a unit around it; torch fails: "
      "expected to be in states [<TrainingState.IDLE: 1>] but current state is "
      "TrainingState.FORWARD_BACKWARD",
      InputError);
}

// An all-frozen block that reaches no loss ends in backward where its input's gradient is complete;
// the root, which left forward after it, ends behind that and asks for it.
TEST_CASE("FSDP1 refuses to gather ahead what has ended without a beginning") {
  ChainSpec spec;
  spec.blocks = 3;
  Model model = ChainWithDroppedBlock(spec, false);
  model.params[model.ops[2].params[0].value].trainable = false;
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 2);
  plan.units = {plan.units[1], plan.units[3]};
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kAllFp32);
  plan.backward_prefetch = BackwardPrefetch::kPost;
  CHECK_THROWS_WITH_AS(
      (void)Lower({model, kernels, job, plan}),
      "plan: units[0]: got unit \"block1\", which reaches no loss, gathered ahead in backward when "
      "that is over for it, expected backward_prefetch \"none\", its parameters in a unit around "
      "it, or no use_orig_params; torch fails: 'NoneType' object has no attribute 'data'",
      InputError);
  plan.use_orig_params = false;
  CHECK(Verify(Lower({model, kernels, job, plan})).empty());
  plan.use_orig_params = true;
  plan.backward_prefetch = BackwardPrefetch::kNone;
  CHECK(Verify(Lower({model, kernels, job, plan})).empty());
}

// Block 1 returns what its first linear made, and drops the result of the second, which is frozen.
// The hook that ends the second was registered before the one with which block 1 begins, and both
// sit on the same tensor (torch_fsdp1_random.py has such a case).
TEST_CASE("FSDP1 ends an all-frozen unit before the unit around it begins, on one tensor") {
  ChainSpec spec;
  spec.blocks = 3;
  spec.linears = 2;
  Model model = ChainModel(spec);
  model.ops[5].inputs = model.ops[3].outputs;
  model.params[model.ops[4].params[0].value].trainable = false;
  model.tensors[model.ops.back().outputs[0].value].role = TensorRole::kLoss;
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 2);
  plan.units[0].name = plan.units[0].modules[0] = "block1.lin1";
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kAllFp32);
  CHECK_THROWS_WITH_AS(
      (void)Lower({model, kernels, job, plan}),
      "plan: units[0]: got unit \"block1.lin1\", which reaches no loss, gathered ahead in backward "
      "when that is over for it, expected backward_prefetch \"none\", its parameters in a unit "
      "around it, or no use_orig_params; torch fails: 'NoneType' object has no attribute 'data'",
      InputError);
  plan.backward_prefetch = BackwardPrefetch::kNone;
  CHECK(Verify(Lower({model, kernels, job, plan})).empty());
}

}  // namespace
}  // namespace shardwright
