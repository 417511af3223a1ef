// What lowered programs of all dialects share, against hand computation: which buffers are alive at
// which moment, which collectives a step issues. The rules are those of docs/lowering.md.

#include "schedule/lower.h"

#include <cstdint>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/verify.h"
#include "schedule/wrap.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

TEST_CASE("Residents: master, AdamW states and sharded gradients are 16 bytes per element") {
  ChainSpec spec;
  spec.blocks = 4;
  spec.width = 64;
  const std::int64_t n = 4 * spec.width * spec.width + spec.width * spec.stem;
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    const Program p = LowerChain(spec, ChainPlan(spec, dialect, 4), kMixed,
                                 [](Job& job) { job.clip_gradients = true; });
    const Bytes64 alive = AliveAt(p, "opt.grad_norm");
    CHECK(Of(alive, Category::kParameterShard) == n / 4 * 4);
    CHECK(Of(alive, Category::kOptimizerState) == n / 4 * 8);
    CHECK(Of(alive, Category::kShardedGradient) == n / 4 * 4);
  }
}

std::int64_t CollectiveBytes(const Program& p) {
  std::int64_t bytes = 0;
  for (const Op& op : p.step.ops) {
    const OpShape& s = p.ShapeOf(op);
    if (s.code == OpCode::kAllGather || s.code == OpCode::kReduceScatter) {
      bytes += s.bytes.value;
    }
  }
  return bytes;
}

TEST_CASE("Full sharding moves 3 N bytes per step; the root only 2 N") {
  ChainSpec spec;
  spec.blocks = 5;
  spec.width = 64;
  const std::int64_t n = spec.width * spec.width, stem = spec.width * spec.stem;
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1}) {
    const Program p = LowerChain(spec, ChainPlan(spec, dialect, 8), kAllFp32);
    CHECK(Count(p, OpCode::kAllGather) == 2 * 5 + 1);
    CHECK(Count(p, OpCode::kReduceScatter) == 6);
    CHECK(CollectiveBytes(p) == 4 * (5 * 3 * n + 2 * stem));
  }
  // Native: the last block's backward follows its forward at once, so it stays gathered.
  const Program p = LowerChain(spec, ChainPlan(spec, Dialect::kNative, 8), kAllFp32);
  CHECK(Count(p, OpCode::kAllGather) == 5 + 1 + 4);
  CHECK(Count(p, OpCode::kGatherCopyOut) == 0);
  CHECK(Count(p, OpCode::kReduceCopyIn) == 0);
}

TEST_CASE("Reshard never, to a smaller group, and hybrid sharding") {
  ChainSpec spec;
  spec.blocks = 5;
  spec.width = 64;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 8);
  for (UnitPlan& unit : plan.units) {
    unit.reshard.kind = Reshard::Kind::kNever;
  }
  CHECK(Count(LowerChain(spec, plan, kMixed), OpCode::kAllGather) == 6);

  plan = ChainPlan(spec, Dialect::kFsdp2, 8);
  for (UnitPlan& unit : plan.units) {
    if (unit.name != "root") {
      unit.reshard = {Reshard::Kind::kToGroup, 4};
    }
  }
  const Program to_group = LowerChain(spec, plan, kMixed);
  CHECK(Count(to_group, OpCode::kReshardClone) == 5);
  CHECK(Count(to_group, OpCode::kAllGather, "reshard4") == 5);
  CHECK(Count(to_group, OpCode::kAllGather, "shard") == 6);
  // Between the passes a quarter of each block stays: checked where the last block computes.
  const std::int64_t u = spec.width * spec.width * 2;
  CHECK(Of(AliveAt(to_group, "mb0.block4.lin0.fwd"), Category::kUnshardedParameter) ==
        4 * u / 4 + u + spec.width * spec.stem * 2);

  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    plan = ChainPlan(spec, dialect, 4);
    plan.replicate_size = 2;
    const Program hybrid = LowerChain(spec, plan, kMixed);
    CHECK(Count(hybrid, OpCode::kAllReduce, "replicate") == 6);
    CHECK(hybrid.groups[1].stride + hybrid.groups.back().stride >= 4);
  }
}

TEST_CASE("Gradient accumulation: which micro-batches reduce") {
  ChainSpec spec;
  spec.blocks = 3;
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Plan plan = ChainPlan(spec, dialect, 4);
    plan.accumulation = 3;
    CHECK(Count(LowerChain(spec, plan, kMixed), OpCode::kReduceScatter) == 3 * 4);
    plan.sync = SyncMode::kLast;
    CHECK(Count(LowerChain(spec, plan, kMixed), OpCode::kReduceScatter) == 4);
  }
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kNative}) {
    Plan plan = ChainPlan(spec, dialect, 4);
    plan.replicate_size = 2;
    plan.accumulation = 3;
    plan.sync = SyncMode::kReplicateLast;
    const Program p = LowerChain(spec, plan, kMixed);
    CHECK(Count(p, OpCode::kReduceScatter) == 3 * 4);
    CHECK(Count(p, OpCode::kAllReduce, "replicate") == 4);
  }
  // FSDP2 keeps unsharded gradients in the reduce dtype, FSDP1 in the compute dtype.
  const std::int64_t n = spec.width * (3 * spec.width + spec.stem);
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1}) {
    Plan plan = ChainPlan(spec, dialect, 4);
    plan.accumulation = 2;
    plan.sync = SyncMode::kLast;
    const Program p = LowerChain(spec, plan, kMixed);
    CHECK(Of(AliveAt(p, "mb1.fwd.copy_h2d"), Category::kUnshardedGradient) ==
          n * (dialect == Dialect::kFsdp2 ? 4 : 2));
  }
}

TEST_CASE("Checkpointing: a recomputed block runs once more and keeps only its input") {
  ChainSpec spec;
  spec.blocks = 4;
  spec.linears = 3;
  spec.rows = 32;
  const std::int64_t tensor = spec.rows * spec.width * 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  const auto activations = [&](const Program& p) {
    return Of(AliveAt(p, "mb0.block3.lin2.fwd"), Category::kActivation);
  };
  // Each linear saves its input: at the last one 12 inputs are alive (the first is the stem's
  // output; the stem's own input is of category input).
  CHECK(activations(LowerChain(spec, plan, kMixed)) == 12 * tensor);
  for (int b = 0; b < spec.blocks; ++b) {
    plan.recompute.push_back({"block" + std::to_string(b), RecomputeKind::kFull, 1});
  }
  const Program p = LowerChain(spec, plan, kMixed);
  CHECK(activations(p) == 4 * tensor);
  int reruns = 0;
  for (const Op& op : p.step.ops) {
    reruns += op.phase == Phase::kRecompute && p.ShapeOf(op).code == OpCode::kCompute ? 1 : 0;
  }
  // The last linear of a block need not run again: nothing saves its output (early stop).
  CHECK(reruns == 4 * 2);
  CHECK(Count(p, OpCode::kAllGather) == 2 * 4 + 1);  // the unit is the region: no extra gather
}

TEST_CASE(
    "Metrics run when backward has ended; logits stay until the next micro-batch has its own") {
  ChainSpec spec;
  spec.blocks = 2;
  spec.linears = 1;
  spec.rows = 16;
  Model model = ChainModel(spec);
  // The last linear's output are the logits: 16 rows of 64, in bf16 2048 bytes, in fp32 4096.
  ModelOp loss;
  loss.spec = static_cast<std::uint32_t>(model.specs.size());
  loss.module = ModuleId(0);
  loss.name = "loss";
  const TensorId logits(model.tensors.size() - 1);
  loss.inputs = {logits, TensorId(logits.value + 1)};
  loss.outputs = {TensorId(logits.value + 2)};
  OpSpec cross_entropy;
  cross_entropy.kind = OpKind::kCrossEntropy;
  cross_entropy.rows = spec.rows;
  cross_entropy.in = spec.width;
  model.specs.push_back(cross_entropy);
  model.tensors.push_back({TensorRole::kIndex, spec.rows, true, ModelOpId()});
  model.tensors.push_back({TensorRole::kActivation, 1, true, ModelOpId(model.ops.size())});
  model.ops.push_back(loss);
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 4);
  plan.accumulation = 2;
  Job job = ChainJob(spec, kMixed);
  job.global_batch = 8;
  const Program p = Lower({model, FindKernelSet("composer-2024", "test"), job, plan});
  CHECK(Verify(p).empty());
  // Two fp32 tensors beside the logits, and no other activation, once backward is over.
  const Bytes64 alive = AliveAt(p, "mb0.loss.bwd#2");
  CHECK(Of(alive, Category::kActivation) == 2048);
  CHECK(Of(alive, Category::kTemporary) == 2 * 4096);
  CHECK(Of(AliveAt(p, "mb0.loss.fwd"), Category::kTemporary) == 2);  // the loss itself
  // In the next micro-batch's last linear: three inputs and both logits. In the update: one.
  CHECK(Of(AliveAt(p, "mb1.block1.lin0.fwd"), Category::kActivation) == 2 * 2048 + 2 * 2048);
  CHECK(Of(AliveAt(p, "opt.optimizer_step"), Category::kActivation) == 2048);
}

TEST_CASE("Frozen parameters have no gradient and no states") {
  ChainSpec spec;
  spec.blocks = 4;
  Model model = ChainModel(spec);
  for (Parameter& p : model.params) {
    p.trainable = p.fqn.rfind("block3", 0) == 0;
  }
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    const Plan plan = ChainPlan(spec, dialect, 4);
    const Job job = ChainJob(spec, kMixed);
    const Program p = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
    const auto findings = Verify(p);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
    CHECK(Count(p, OpCode::kReduceScatter) == 1);
    // Nothing below block3 needs a gradient, so backward stops there. FSDP2 prefetches block2 all
    // the same; FSDP1 knows that its outputs need no gradient; native keeps block3 gathered.
    const int backward = dialect == Dialect::kFsdp2 ? 2 : dialect == Dialect::kFsdp1 ? 1 : 0;
    CHECK(Count(p, OpCode::kAllGather) == 5 + backward);
    const Bytes64 alive = AliveAt(p, "block3.opt.optimizer_step");
    CHECK(Of(alive, Category::kOptimizerState) == spec.width * spec.width / 4 * 8);
  }
}

TEST_CASE("A step of more ops than a program can name is refused") {
  // One rank: 4 blocks of 64 x 64 weights and the stem of 64 x 8.
  ChainSpec spec;
  const auto error_of = [&](const Plan& plan) -> std::string {
    try {
      const Model model = ChainModel(spec);
      (void)Lower({model, FindKernelSet("torch-eager", "test"), ChainJob(spec, kMixed), plan});
    } catch (const InputError& e) {
      return e.what();
    }
    return "";
  };
  Plan plan = ChainPlan(spec, Dialect::kNative, 1);
  plan.offload.moments = true;
  plan.moments_piece = Bytes(1);  // of one element each: 4,096 of a block
  CHECK(error_of(plan) == "");
  spec.width = 257;
  CHECK(error_of(plan) ==
        "plan: moments_piece: got 1, expected pieces of which one unit has at most 65536");
  spec.width = 64;
  spec.blocks = 400;
  plan = ChainPlan(spec, Dialect::kNative, 1);
  plan.accumulation = 65535;
  CHECK(error_of(plan) ==
        "plan: accumulation: got 65535, expected a step of at most 5000000 ops; --budget 2 allows "
        "twice as many");
  spec = ChainSpec();
  spec.width = 257;
  plan = ChainPlan(spec, Dialect::kZero1, 2);
  plan.units.back().reshard.kind = Reshard::Kind::kAlways;
  plan.zero.allgather_bucket = 2;  // 33,025 of a block; 264,196 of all blocks
  CHECK(error_of(plan) == "");
  plan.units.erase(plan.units.begin(), plan.units.end() - 1);
  CHECK(error_of(plan) ==
        "plan: got more than 65536 all_gather ops of one unit, expected larger buckets or pieces");
}

// transformers 5.23, modeling_flash_attention_utils.py: _is_packed_sequence looks at positions of
// one sample only; scaled_dot_product_attention, before which k and v are repeated, is called
// without.
TEST_CASE("Transformers' flash-attn makes the host wait in every layer of one sample") {
  const Model model = LoadModel("llama-3.2-1b", {.sequence_length = 128});
  const auto waits = [&](const char* kernels, std::int64_t micro_batch, bool recomputes) {
    Job job;
    job.sequence_length = 128;
    Plan plan;
    plan.dialect = Dialect::kDdp;
    plan.micro_batch = micro_batch;
    plan.units = Wrap(model, ParseWrap("root", "test"), {}, Dialect::kDdp, "test");
    for (int layer = 0; recomputes && layer < 16; ++layer) {
      plan.recompute.push_back({"model.layers." + std::to_string(layer), RecomputeKind::kFull, 1});
    }
    const Program p = Lower({model, FindKernelSet(kernels, "test"), job, plan});
    CHECK(Verify(p).empty());
    return Count(p, OpCode::kHostWait);
  };
  CHECK(waits("hf-liger-full", 1, false) - waits("hf-liger-full", 2, false) == 16);
  CHECK(waits("hf-liger-full", 1, true) - waits("hf-liger-full", 2, true) == 32);
  for (const char* kernels : {"hf-eager", "hf-2022", "torch-eager"}) {
    CHECK(waits(kernels, 1, false) == waits(kernels, 2, false));
  }
}

}  // namespace
}  // namespace shardwright
