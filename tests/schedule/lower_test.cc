// Lowered programs against hand computation: layouts and padding, which buffers are alive at which
// moment, which collectives a step issues. The rules are those of docs/lowering.md.

#include "schedule/lower.h"

#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/kernel_set.h"
#include "schedule/lower/layout.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

// Model with one unit of the given parameter shapes.
Model ParamsModel(const std::vector<std::vector<std::int64_t>>& shapes) {
  Model model;
  const ModuleId root = AddModule(model, {}, "", "Root");
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    AddParam(model, root, "p" + std::to_string(i), shapes[i]);
  }
  return model;
}

ResolvedUnit WholeUnit(const Model& model) {
  ResolvedUnit unit{"root", {ModuleId(0)}, {}};
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    unit.params.push_back(ParamId(p));
  }
  return unit;
}

TEST_CASE("FSDP2 pads each parameter to whole rows per rank") {
  // (3, 1024) over 8 ranks is stored as 8 rows; a vector of 10 becomes 16; (16, 4) stays.
  const Model model = ParamsModel({{3, 1024}, {10}, {16, 4}});
  const UnitInfo info = LayoutPerParameter(model, WholeUnit(model), 8);
  CHECK(info.elements == 3 * 1024 + 10 + 64);
  CHECK(info.padded_elements == 8 * 1024 + 16 + 64);
  CHECK(info.shard_elements == 1024 + 2 + 8);
  CHECK(info.params[1].shard_offset == 1024);
  CHECK(info.params[2].unsharded_offset == 8 * 1024 + 16);
}

// One layer of experts: per expert gate (5, 4), down (4, 5) and up (5, 4).
Model ExpertsModel(std::int64_t experts) {
  std::vector<std::vector<std::int64_t>> shapes;
  for (std::int64_t e = 0; e < experts; ++e) {
    shapes.insert(shapes.end(), {{5, 4}, {4, 5}, {5, 4}});
  }
  Model model = ParamsModel(shapes);
  OpSpec spec;
  spec.kind = OpKind::kExperts;
  spec.gated = spec.up_last = true;
  spec.experts = experts;
  model.specs = {spec};
  ModelOp op;
  op.module = ModuleId(0);
  for (std::size_t p = 0; p < model.params.size(); ++p) {
    op.params.push_back(ParamId(p));
  }
  model.ops = {op};
  return model;
}

TEST_CASE("FSDP2 pads the number of experts that are one tensor") {
  const Model model = ExpertsModel(6);
  // A matrix each: 5 rows of 4 become 8, 4 rows of 5 stay: 6 (2 * 32 + 20).
  CHECK(LayoutPerParameter(model, WholeUnit(model), 4).padded_elements == 504);
  // Stacked: (6, 10, 4) and (6, 4, 5) become (8, 10, 4) and (8, 4, 5); 2 of 8 experts per rank.
  const UnitInfo info = LayoutPerParameter(model, WholeUnit(model), 4, StackExperts(model));
  CHECK(info.elements == 6 * 60);
  CHECK(info.padded_elements == 8 * 60);
  CHECK(info.shard_elements == 2 * 60);
  REQUIRE(info.params.size() == 2);
  CHECK(info.params[0].padded_elements == 8 * 40);
  CHECK(info.params[1].param == ParamId(1));
  CHECK(info.params[1].unsharded_offset == 8 * 40);
  // 64 ranks keep one expert each: 64 / 6 times the elements.
  CHECK(LayoutPerParameter(model, WholeUnit(model), 64, StackExperts(model)).padded_elements ==
        64 * 60);
}

TEST_CASE("FSDP1 aligns to 16 bytes of the compute dtype only with use_orig_params") {
  // 5 and 7 elements over 4 ranks. bf16: 8 elements per 16 bytes, so the second starts at 8; the
  // total 15 is padded to 16. Without: 12 elements, 3 per rank.
  const Model model = ParamsModel({{5}, {7}});
  const UnitInfo with = LayoutFlat(model, WholeUnit(model), 4, true, DType::kBf16);
  CHECK(with.params[1].unsharded_offset == 8);
  CHECK(with.padded_elements == 16);
  CHECK(with.shard_elements == 4);
  const UnitInfo without = LayoutFlat(model, WholeUnit(model), 4, false, DType::kBf16);
  CHECK(without.params[1].unsharded_offset == 5);
  CHECK(without.padded_elements == 12);
  CHECK(without.shard_elements == 3);
  // fp32: 4 elements per 16 bytes: 5 -> 8, 8 + 7 = 15 -> 16.
  CHECK(LayoutFlat(model, WholeUnit(model), 4, true, DType::kFp32).padded_elements == 16);
  // The paper's bound without alignment: at most W - 1 elements of padding.
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    const std::int64_t w = std::uniform_int_distribution<std::int64_t>(1, 64)(random);
    const Model m = ParamsModel({{std::uniform_int_distribution<std::int64_t>(1, 5000)(random)},
                                 {std::uniform_int_distribution<std::int64_t>(1, 70)(random), 3}});
    const UnitInfo info = LayoutFlat(m, WholeUnit(m), w, false, DType::kBf16);
    CHECK(info.padded_elements - info.elements >= 0);
    CHECK(info.padded_elements - info.elements < w);
    CHECK(info.shard_elements * w == info.padded_elements);
  }
}

TEST_CASE("Native aligns parameters and shards to 256 bytes") {
  const Model model = ParamsModel({{5}, {300}});
  const UnitInfo info = LayoutNative(model, WholeUnit(model), 3, DType::kBf16);
  CHECK(info.params[1].unsharded_offset == 128);
  // 428 elements over 3 ranks: 143 per rank, rounded up to 256.
  CHECK(info.shard_elements == 256);
  CHECK(info.padded_elements == 768);
}

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

TEST_CASE("DDP buckets: 1 MiB first, then 25 MiB, closed by the tensor that passes the cap") {
  // Weights of 512 x 512 fp32 are 1 MiB each. Backward makes block19 .. block0, then the stem
  // (512 x 8: 16 KiB). Steady order: {block19}, {block18}: the first holds 1 MiB >= 1 MiB and
  // closes; the other 19 MiB and the stem stay below 25 MiB and form one bucket.
  ChainSpec spec;
  spec.blocks = 20;
  spec.width = 512;
  Plan plan = ChainPlan(spec, Dialect::kDdp, 1);
  plan.replicate_size = 8;
  UnitPlan root = plan.units.back();
  plan.units = {root};
  const Program p = LowerChain(spec, plan, kAllFp32);
  std::vector<std::int64_t> steady, first;
  for (const Body* body : {&p.warmup, &p.step}) {
    for (const Op& op : body->ops) {
      if (p.ShapeOf(op).code == OpCode::kAllReduce) {
        (body == &p.step ? steady : first).push_back(p.ShapeOf(op).bytes.value);
      }
    }
  }
  const std::int64_t mib = std::int64_t{1} << 20, stem = 512 * 8 * 4;
  CHECK(steady == std::vector<std::int64_t>{mib, 19 * mib + stem});
  // In the first step all are in one bucket (tests/schedule/torch_ddp_random.py).
  CHECK(first == std::vector<std::int64_t>{20 * mib + stem});
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
  CHECK(error_of(plan).starts_with("plan: accumulation: got 65535, expected a step of at most "));
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
