// FSDP2 programs against hand computation: docs/lowering.md, section fsdp2.

#include <array>
#include <cstdint>
#include <random>
#include <string>
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

// 4 blocks of 64 x 64 = 4,096 weights on 4 ranks: 1,024 of each per rank. The stem reads 8 numbers,
// no multiple of 16, and stays in bf16.
TEST_CASE("FSDP2 gathers of weights in fp8") {
  const ChainSpec spec;
  KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Model model = ChainModel(spec);
  const Job job = ChainJob(spec, kMixed);
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  for (const auto fp8 : {Fp8Products::kGathered, Fp8Products::kPrecomputed}) {
    kernels.fp8 = fp8;
    const Program p = Lower({model, kernels, job, plan});
    CHECK(Verify(p).empty());
    const bool sums = fp8 == Fp8Products::kGathered;
    // A unit is gathered forward and backward, the last one is not freed in between; a number each.
    CHECK(Count(p, OpCode::kAllReduce) == (sums ? 8 : 1));
    for (const Op& op : p.step.ops) {
      const OpShape& s = p.ShapeOf(op);
      if (s.code == OpCode::kAllGather) {
        CHECK(s.bytes == Bytes(s.dtype == DType::kFp8 ? 4096 : 64 * 8 * 2));
      } else if (s.code == OpCode::kAllReduce) {
        CHECK(s.bytes == Bytes(sums ? 4 : 16));
      }
    }
    // The stem in bf16, the block before, what is gathered; 1,024 bytes cast by way of 8,192.
    CHECK(Communication(AliveAt(p, "mb0.block2.fwd.gather_copy_in")) ==
          64 * 8 * 2 + 4096 + 4096 + 1024 + 8192);
    CHECK(Communication(AliveAt(p, "mb0.block2.lin0.fwd")) == 64 * 8 * 2 + 2 * 4096);
    CHECK((p.warmup.size() > 0) == !sums);  // no update has left scales for the first step
  }
  plan.dialect = Dialect::kFsdp1;
  CHECK_THROWS_WITH_AS((void)Lower({model, kernels, job, plan}),
                       doctest::Contains("fsdp2 alone gathers fp8"), InputError);
  // 64 rows are no multiple of 3.
  CHECK_THROWS_WITH_AS((void)Lower({model, kernels, job, ChainPlan(spec, Dialect::kFsdp2, 3)}),
                       doctest::Contains("torchao gathers no padding in fp8"), InputError);
}

// Equal units of n elements, dtypes p (compute) and r (reduce); U = n p, G = n p, R = n r.
TEST_CASE("FSDP2 transient memory of equal units") {
  std::mt19937 random(11);
  for (int trial = 0; trial < 60; ++trial) {
    ChainSpec spec;
    spec.blocks = 8;
    const std::int64_t w = std::int64_t{1} << std::uniform_int_distribution<int>(1, 4)(random);
    spec.width = 16 * std::uniform_int_distribution<std::int64_t>(1, 12)(random);
    const Precision precision =
        std::array{kAllFp32, kMixed, kPure}[static_cast<std::size_t>(trial % 3)];
    const std::int64_t n = spec.width * spec.width;
    const std::int64_t u = n * SizeOf(precision.param), g = u, r = n * SizeOf(precision.reduce);
    const std::int64_t cast = precision.param == precision.master ? 0 : u / w;
    const std::int64_t stem = spec.width * spec.stem * SizeOf(precision.param);
    CAPTURE(trial);
    Plan plan = ChainPlan(spec, Dialect::kFsdp2, w);
    {
      const Program p = LowerChain(spec, plan, precision);
      // The root's stem stays gathered; its gather buffer is long gone.
      CHECK(Communication(AliveAt(p, "mb0.block4.fwd.gather_copy_in")) == stem + u + u + cast);
      CHECK(Communication(AliveAt(p, "mb0.block4.lin0.fwd")) == stem + 2 * u);
      CHECK(Communication(AliveAt(p, "mb0.block4.bwd.gather_copy_out")) == stem + u + u + r);
      CHECK(Communication(AliveAt(p, "mb0.block4.lin0.bwd")) == stem + u + u + r + g);
      CHECK(Communication(AliveAt(p, "mb0.block4.bwd.reduce_copy_in")) == stem + u + g + r);
      const std::int64_t shard_r = r / w;
      const bool casts = precision.reduce != precision.master;
      CHECK(Communication(AliveAt(p, "mb0.block4.bwd.reduce_scatter")) ==
            stem + u + r + (casts ? shard_r : 0));
    }
    // Explicit forward prefetch of one unit: 3 U while a block computes.
    for (int b = 0; b + 1 < spec.blocks; ++b) {
      plan.units[static_cast<std::size_t>(b)].forward_prefetch = {"block" + std::to_string(b + 1)};
    }
    CHECK(Communication(AliveAt(LowerChain(spec, plan, precision), "mb0.block4.lin0.fwd")) ==
          stem + 3 * u);
  }
}

TEST_CASE("FSDP2 usual peak: 10 bytes per element in mixed precision, 16 in fp32, 8 in bf16") {
  ChainSpec spec;
  spec.blocks = 6;
  spec.width = 128;
  const std::int64_t n = spec.width * spec.width, stem = spec.width * spec.stem;
  const Plan plan = ChainPlan(spec, Dialect::kFsdp2, 8);
  const auto peak = [&](Precision precision) {
    return Communication(AliveAt(LowerChain(spec, plan, precision), "mb0.block3.lin0.bwd")) -
           stem * SizeOf(precision.param);
  };
  CHECK(peak(kMixed) == 10 * n);
  CHECK(peak(kAllFp32) == 16 * n);
  CHECK(peak(kPure) == 8 * n);
}

TEST_CASE("FSDP2 without sync: the first gradients are cast when the parameters are gone") {
  ChainSpec spec;
  spec.blocks = 3;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.accumulation = 3;
  plan.sync = SyncMode::kLast;
  const Program p = LowerChain(spec, plan, kMixed);
  const auto parameters = [&](const std::string& micro_batch) {
    return Of(AliveAt(p, micro_batch + ".block1.bwd.grad_store"), Category::kUnshardedParameter);
  };
  const std::int64_t root = spec.width * spec.stem * 2;
  CHECK(parameters("mb0") == root);
  // Later ones are added before that.
  CHECK(parameters("mb1") == root + spec.width * spec.width * 2);
  CHECK(parameters("mb2") == root + spec.width * spec.width * 2);
}

// Where gradients are reduced in the dtype that they are made in, they stay in .grad, and autograd
// adds each of the next micro-batch's as soon as it is there: one at a time exists beside them.
TEST_CASE("FSDP2 without sync: later gradients are added in place") {
  ChainSpec spec;
  spec.blocks = 3;
  spec.linears = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.accumulation = 3;
  plan.sync = SyncMode::kLast;
  for (const Precision& precision : {kAllFp32, kPure}) {
    const Program p = LowerChain(spec, plan, precision);
    const auto gradients = [&](const std::string& op) {
      return Of(AliveAt(p, op), Category::kUnshardedGradient) / SizeOf(precision.param);
    };
    const std::int64_t n = spec.width * spec.width, all = 6 * n + spec.width * spec.stem;
    // Of the first one: those of block 2, and the one at hand.
    CHECK(gradients("mb0.block1.lin1.bwd") == 3 * n);
    CHECK(gradients("mb0.block1.lin0.bwd") == 4 * n);
    for (const std::string later : {"mb1.", "mb2."}) {
      // Of the last one block 2's are reduced before block 0 begins.
      const std::int64_t reduced = later == "mb2." ? 2 * n : 0;
      CHECK(gradients(later + "block2.lin1.bwd") == all + n);
      CHECK(gradients(later + "block2.lin0.bwd") == all + n);
      CHECK(gradients(later + "block1.lin0.bwd") == all - reduced + n);
      CHECK(gradients(later + "block0.lin1.bwd") == all - 2 * reduced + n);
    }
  }
}

// With replicas that reduce last, what the shards have summed stays as it is until then.
TEST_CASE(
    "FSDP2 with replicas that reduce last: what the shards have summed is a sharded gradient") {
  ChainSpec spec;
  spec.blocks = 3;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.replicate_size = 2;
  plan.accumulation = 2;
  plan.sync = SyncMode::kReplicateLast;
  const std::int64_t n = spec.width * spec.width, all = 3 * n + spec.width * spec.stem;
  for (const Precision& precision : {kAllFp32, kMixed, kPure}) {
    const Program p = LowerChain(spec, plan, precision);
    CHECK(Of(AliveAt(p, "mb1.block0.fwd.all_gather"), Category::kShardedGradient) ==
          all / 4 * SizeOf(precision.reduce));
  }
}

// The chain with block 0 run once more after block 2, by the same parameters.
Model ChainWithSecondCall(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  ModelOp again = model.ops[1];
  again.name = "again";
  again.inputs = {TensorId(model.ops.back().outputs[0].value)};
  again.outputs = {TensorId(model.tensors.size())};
  model.tensors.push_back(
      {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
  model.ops.push_back(again);
  return model;
}

// The chain with its last block run once more, right behind itself.
Model ChainWithCallInARow(const ChainSpec& spec, bool is_further_call) {
  Model model = ChainModel(spec);
  ModelOp again = model.ops.back();
  again.name = "again";
  again.inputs = {model.ops.back().outputs[0]};
  again.outputs = {TensorId(model.tensors.size())};
  if (is_further_call) {
    again.called_again = model.modules[again.module.value].parent;  // the block
  }
  model.tensors.push_back(
      {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
  model.ops.push_back(again);
  ValidateModel(model, "test");
  return model;
}

// torch runs its hooks per call (post_forward of _fsdp_param_group.py): two calls of one module are
// two gathers in forward and two in backward. Autograd sums the gradients of both before the
// parameter has one: one reduce-scatter.
TEST_CASE("FSDP2 gathers a unit per call of its module") {
  ChainSpec spec;
  spec.blocks = 3;
  const Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kMixed);
  // Root, and three blocks: 1 + 3 gathers forward, 3 backward (the root keeps its own).
  const Program once = Lower({ChainModel(spec), kernels, job, plan});
  CHECK(Count(once, OpCode::kAllGather) == 7);
  CHECK(Count(once, OpCode::kReduceScatter) == 4);
  const Program twice = Lower({ChainWithSecondCall(spec), kernels, job, plan});
  CHECK(Verify(twice).empty());
  CHECK(Count(twice, OpCode::kAllGather) == 9);
  CHECK(Count(twice, OpCode::kReduceScatter) == 4);
  // In a row, too; an op more of the same call is none.
  const Program row = Lower({ChainWithCallInARow(spec, true), kernels, job, plan});
  CHECK(Verify(row).empty());
  CHECK(Count(row, OpCode::kAllGather) == 9);
  CHECK(Count(row, OpCode::kReduceScatter) == 4);
  CHECK(Count(Lower({ChainWithCallInARow(spec, false), kernels, job, plan}), OpCode::kAllGather) ==
        7);
  // What the first of two micro-batches kept is reduced after the later call, as torch does.
  Plan kept = plan;
  kept.accumulation = 2;
  kept.sync = SyncMode::kLast;
  const Program last = Lower({ChainWithSecondCall(spec), kernels, job, kept});
  CHECK(Verify(last).empty());
  CHECK(Count(last, OpCode::kReduceScatter) == 5);
}

// torch's hooks sit on what a module returns, and before it on a node of its inputs: a module that
// returns what it was given is gathered in backward although nothing of it runs there, and freed at
// once. Forward: root and three blocks. Backward, without: blocks 2 and 0 are copied out (block 1
// is gathered ahead and dropped); with it block 1, too.
TEST_CASE("FSDP2 gathers in backward what returns its input") {
  ChainSpec spec;
  spec.blocks = 3;
  const Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  for (const bool returns : {false, true}) {
    const Program p = Lower({ChainWithDroppedBlock(spec, returns),
                             FindKernelSet("torch-eager", "test"), ChainJob(spec, kMixed), plan});
    CHECK(Verify(p).empty());
    CHECK(Count(p, OpCode::kGatherCopyOut) == (returns ? 7 : 6));
    CHECK(Count(p, OpCode::kAllGather) == 7);
    CHECK(Count(p, OpCode::kReduceScatter) == 3);  // nothing has a gradient in block 1
  }
}

// The chain of two blocks, of which the second one holds the first one's second name; it calls that
// `last`, or before its own layer.
Model ChainWithBlockInBlock(const ChainSpec& spec, bool last) {
  Model model = ChainModel(spec);
  const ModuleId block = model.modules[model.ops[1].module.value].parent;
  const ModuleId around = model.modules[model.ops[2].module.value].parent;
  const ModuleId again = AddModule(model, around, "again", "Block");
  model.modules[again.value].same_as = block;
  const ModuleId layer = AddModule(model, again, "lin0", "Linear");
  model.modules[layer.value].same_as = model.ops[1].module;
  ModelOp op = model.ops[1];
  op.module = layer;
  op.params = {
      AddParam(model, layer, "weight", {spec.width, spec.width}, model.ops[1].params.front())};
  op.inputs = model.ops[2].outputs;
  op.outputs = {TensorId(model.tensors.size())};
  model.tensors.push_back(
      {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
  model.ops.push_back(op);
  if (!last) {
    std::swap(model.ops[2].module, model.ops[3].module);
    std::swap(model.ops[2].name, model.ops[3].name);
    std::swap(model.ops[2].params, model.ops[3].params);
  }
  ValidateModel(model, "test");
  return model;
}

// torch nests the checkpoints. Of two that end together the inner one asks for its input, which the
// outer one makes again by the layer before, and keeps nothing but that input itself: one layer
// runs again. With a layer behind it the outer one makes that one's input again, by the inner one,
// which has kept its own input and later runs its hooks alone.
TEST_CASE("FSDP2: a checkpoint inside of another") {
  ChainSpec spec;
  spec.blocks = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.recompute = {{"block0", RecomputeKind::kFull, 1}, {"block1", RecomputeKind::kFull, 1}};
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kMixed);
  for (const bool last : {true, false}) {
    const Program p = Lower({ChainWithBlockInBlock(spec, last), kernels, job, plan});
    CHECK(Verify(p).empty());
    int reruns = 0;
    for (const Op& op : p.step.ops) {
      reruns += op.phase == Phase::kRecompute && p.ShapeOf(op).code == OpCode::kCompute ? 1 : 0;
    }
    CHECK(reruns == 1);
  }
  plan.dialect = Dialect::kNative;  // whose regions are not torch's
  CHECK_THROWS_WITH_AS(
      (void)Lower({ChainWithBlockInBlock(spec, false), kernels, job, plan}),
      "plan: recompute: got \"block0\", expected regions that do not overlap, or "
      "one inside of another; what lies in two of them runs a third time, which "
      "our programs can say of a region inside of one other, without fused kernels "
      "and offloaded activations",
      InputError);
}

// The chain of two blocks of two layers, of which the second one calls the first one, by a name of
// its own, between its layers.
Model ChainWithBlockBetween(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  const ModuleId block = model.modules[model.ops[1].module.value].parent;
  const ModuleId around = model.modules[model.ops[3].module.value].parent;
  const ModuleId again = AddModule(model, around, "again", "Block");
  model.modules[again.value].same_as = block;
  const ModelOp behind = model.ops[4];
  model.ops.pop_back();
  model.tensors.pop_back();
  const auto add = [&](ModuleId module, const std::vector<ParamId>& params) {
    ModelOp op = behind;
    op.module = module;
    op.name = model.modules[module.value].name;
    op.params = params;
    op.inputs = model.ops.back().outputs;
    op.outputs = {TensorId(model.tensors.size())};
    model.tensors.push_back(
        {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
    model.ops.push_back(op);
  };
  for (const std::size_t i : {1U, 2U}) {
    const ModuleId own = model.ops[i].module;
    const ModuleId layer = AddModule(model, again, model.modules[own.value].name, "Linear");
    model.modules[layer.value].same_as = own;
    add(layer,
        {AddParam(model, layer, "weight", {spec.width, spec.width}, model.ops[i].params.front())});
  }
  add(behind.module, behind.params);
  ValidateModel(model, "test");
  return model;
}

// The layer behind the inner block asks for its input, for which that block runs again. It keeps
// its own input alone, so its first layer runs a third time for the second one's backward.
TEST_CASE("FSDP2: a checkpoint inside of another, and a layer behind it") {
  ChainSpec spec;
  spec.blocks = spec.linears = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.recompute = {{"block0", RecomputeKind::kFull, 1}, {"block1", RecomputeKind::kFull, 1}};
  const Program p = Lower({ChainWithBlockBetween(spec), FindKernelSet("torch-eager", "test"),
                           ChainJob(spec, kMixed), plan});
  CHECK(Verify(p).empty());
  std::vector<std::string> again;
  for (const Op& op : p.step.ops) {
    if (op.phase == Phase::kRecompute && p.ShapeOf(op).code == OpCode::kCompute) {
      again.push_back(p.model_op_names[op.subject]);
    }
  }
  CHECK(again == std::vector<std::string>{"block1.lin0", "block1.again.lin0", "block1.again.lin1",
                                          "block1.again.lin0", "block0.lin0"});
}

// The chain with a sum of its last block's input and output at the end of that block.
Model ChainWithSum(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  OpSpec sum;
  sum.kind = OpKind::kAdd;
  sum.rows = spec.rows;
  sum.in = sum.out = spec.width;
  model.specs.push_back(sum);
  const ModelOp& end = model.ops.back();
  ModelOp op;
  op.spec = static_cast<std::uint32_t>(model.specs.size() - 1);
  op.module = model.modules[end.module.value].parent;
  op.name = "sum";
  op.inputs = {model.ops[model.ops.size() - 3].outputs[0], end.outputs[0]};
  op.outputs = {TensorId(model.tensors.size())};
  model.tensors.push_back(
      {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
  model.ops.push_back(op);
  ValidateModel(model, "test");
  return model;
}

// A sum keeps nothing that its backward reads, so backward of the block begins without running it
// again: the hook of its last unit comes first (torch_fsdp2_random.py has such a case).
TEST_CASE("FSDP2 gathers the unit before a sum before the block runs again") {
  ChainSpec spec;
  spec.blocks = 2;
  spec.linears = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.units[1].name = plan.units[1].modules[0] = "block1.lin0";
  UnitPlan last = plan.units[1];
  last.name = last.modules[0] = "block1.lin1";
  plan.units.insert(plan.units.begin() + 2, last);
  plan.units.back().backward_prefetch = {"block0"};  // not the one before it, as by default
  plan.recompute = {{"block1", RecomputeKind::kFull, 1}};
  const Program p = Lower(
      {ChainWithSum(spec), FindKernelSet("torch-eager", "test"), ChainJob(spec, kMixed), plan});
  CHECK(Verify(p).empty());
  std::vector<std::string> gathered;
  for (const Op& op : p.step.ops) {
    if (p.ShapeOf(op).code == OpCode::kAllGather && op.phase != Phase::kForward) {
      gathered.push_back(p.units[op.subject].name);
    }
  }
  CHECK(gathered == std::vector<std::string>{"block0", "block1.lin1", "block1.lin0"});
}

// Forward only nothing is resharded that says so: gathered in the first pass, then there.
TEST_CASE("FSDP2 keeps what is not resharded from one forward pass to the next") {
  ChainSpec spec;
  spec.blocks = 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.units[1].reshard.kind = Reshard::Kind::kNever;
  const Program p = LowerChain(spec, plan, kMixed, [](Job& job) { job.mode = JobMode::kForward; });
  int first = 0;
  for (const Op& op : p.warmup.ops) {
    first += p.ShapeOf(op).code == OpCode::kAllGather ? 1 : 0;
  }
  CHECK(first == 3);
  CHECK(Count(p, OpCode::kAllGather) == 1);
}

// The chain of one block, called once more on what it returned.
Model ChainWithBlockAgain(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  const std::size_t end = model.ops.size();
  for (std::size_t i = 1; i < end; ++i) {  // behind the stem
    ModelOp again = model.ops[i];
    again.inputs = {TensorId(model.tensors.size() - 1)};
    again.outputs = {TensorId(model.tensors.size())};
    if (i == 1) {
      again.called_again = model.modules[again.module.value].parent;
    }
    model.tensors.push_back(
        {TensorRole::kActivation, spec.rows * spec.width, true, ModelOpId(model.ops.size())});
    model.ops.push_back(again);
  }
  ValidateModel(model, "test");
  return model;
}

// The frozen lin0 is gathered for both calls in forward, and in backward for the second call, which
// ends with it, and for the first one, which runs again and has no backward in lin0: no hook frees
// that, and the next step finds it gathered.
TEST_CASE("FSDP2 keeps a frozen unit that runs again without a backward into the next step") {
  ChainSpec spec;
  spec.blocks = 1;
  spec.linears = 2;
  Model model = ChainWithBlockAgain(spec);
  model.params[0].trainable = model.params[1].trainable = false;  // the stem, lin0
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.units[0].name = plan.units[0].modules[0] = "block0.lin0";
  plan.recompute = {{"block0", RecomputeKind::kFull, 1}};
  for (const std::int64_t micro_batches : {1, 2}) {
    plan.accumulation = micro_batches;
    const Program p =
        Lower({model, FindKernelSet("torch-eager", "test"), ChainJob(spec, kMixed), plan});
    CHECK(Verify(p).empty());
    const auto gathers = [&](const Body& body) {
      std::int64_t count = 0;
      for (const Op& op : body.ops) {
        count += p.ShapeOf(op).code == OpCode::kAllGather && p.units[op.subject].name != "root";
      }
      return count;
    };
    CHECK(gathers(p.warmup) == 1 + 3 * micro_batches);
    CHECK(gathers(p.step) == 3 * micro_batches);
  }
}

// A parameter of block 0 used by the op of block 1, where block 0 is sharded again.
// As torch 2.13 does it (torch_fsdp2_random.py has these cases): a unit that runs again before its
// own backward takes itself for the root of a forward pass and says so to the profiler, which is
// one call more than in forward, unless what it needs was gathered ahead, which is one less; the
// hooks of a unit whose backward has begun call less, too.
TEST_CASE("FSDP2: units inside of what is recomputed selectively") {
  ChainSpec spec;
  spec.linears = 2;
  const Model model = ChainModel(spec);
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const auto runs = [&](const Plan& plan, const Precision& precision) {
    return Verify(Lower({model, kernels, ChainJob(spec, precision), plan})).empty();
  };
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  plan.recompute = {{"block1", RecomputeKind::kSelective, 2}};
  plan.units[1].name = plan.units[1].modules[0] = "block1.lin0";
  CHECK(runs(plan, kAllFp32));
  Plan fetches_other = plan;
  fetches_other.units[2].backward_prefetch = {"block0"};
  Plan one_rank = plan;
  one_rank.shard_size = 1;
  for (const Precision& precision : {kAllFp32, kMixed}) {
    for (const Plan& failing : {fetches_other, one_rank}) {
      CHECK_THROWS_WITH_AS(
          (void)Lower({model, kernels, ChainJob(spec, precision), failing}),
          "plan.recompute[0].kind: got \"selective\", expected \"full\", or no unit inside of "
          "\"block1\"; unit \"block1.lin0\" is inside, and torch's selective checkpoint fails on "
          "its hooks: profiler._record_function_enter_new encountered during backward but not "
          "found "
          "in storage",
          InputError);
    }
  }
  // The lists of torch 2.8 have only what is kept.
  fetches_other.torch = TorchRelease::k2_8;
  CHECK(runs(fetches_other, kMixed));
  one_rank.units[1].name = one_rank.units[1].modules[0] = "block1.lin1";
  CHECK(runs(one_rank, kMixed));
  one_rank.units.insert(one_rank.units.begin(), one_rank.units[1]);
  one_rank.units[0].name = one_rank.units[0].modules[0] = "block1.lin0";
  CHECK(runs(one_rank, kMixed));
}

TEST_CASE("FSDP2 refuses a parameter used where its unit is not gathered") {
  ChainSpec spec;
  spec.blocks = 2;
  Model model = ChainModel(spec);
  model.ops[2].params = model.ops[1].params;
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Job job = ChainJob(spec, kMixed);
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  CHECK_THROWS_WITH_AS(
      (void)Lower({model, kernels, job, plan}),
      "plan: units[0]: got parameter \"block0.lin0.weight\" used in module \"block1.lin0\", where "
      "the unit \"block0\" is not gathered, expected its uses inside the unit's forward; torch "
      "fails: got mixed torch.Tensor and DTensor; give the unit both modules, or leave the "
      "parameter to the root",
      InputError);
  plan.units[0].reshard.kind = Reshard::Kind::kNever;  // still there
  CHECK(Verify(Lower({model, kernels, job, plan})).empty());
}

}  // namespace
}  // namespace shardwright
