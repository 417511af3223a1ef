// DDP programs against hand computation: docs/lowering.md, section ddp.

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/loader.h"
#include "models/trainable.h"
#include "schedule/lower.h"
#include "schedule/lower/layout.h"
#include "schedule/lower/optimizer.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using Sizes = std::vector<std::int64_t>;

// The bytes of each all-reduce, in order.
Sizes ReducedBy(const Program& program, const Body& body) {
  Sizes bytes;
  for (const Op& op : body.ops) {
    if (program.ShapeOf(op).code == OpCode::kAllReduce) {
      bytes.push_back(program.ShapeOf(op).bytes.value);
    }
  }
  return bytes;
}

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

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
  const std::int64_t mib = std::int64_t{1} << 20, stem = 512 * 8 * 4;
  CHECK(ReducedBy(p, p.step) == Sizes{mib, 19 * mib + stem});
  // In the first step all are in one bucket (tests/schedule/torch_ddp_random.py).
  CHECK(ReducedBy(p, p.warmup) == Sizes{20 * mib + stem});
}

// As above with masters in bf16, 512 KiB a block, and three weights in fp32. Buckets have one
// dtype: block19 closes the first in fp32, the others in bf16 and the last ones in fp32 stay open,
// of which the dtype that came last (bf16) goes first. Gradients, states and masters are as wide as
// a weight.
TEST_CASE("DDP: masters of two dtypes") {
  ChainSpec spec;
  spec.blocks = 20;
  spec.width = 512;
  Plan plan = ChainPlan(spec, Dialect::kDdp, 1);
  plan.replicate_size = 8;
  plan.units = {UnitPlan(plan.units.back())};
  const Model model = ChainModel(spec);
  Job job = ChainJob(spec, {DType::kBf16, DType::kBf16, DType::kBf16});
  job.optimizer.kind = OptimizerKind::kAdamW;
  job.fp32_masters = {"block19*", "block3.*", "block0.*"};
  const Program p = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  CHECK(Verify(p).empty());
  const std::int64_t kib = 1024, stem = 512 * 8 * 2;
  std::vector<std::pair<DType, std::int64_t>> steady;
  for (const Op& op : p.step.ops) {
    if (p.ShapeOf(op).code == OpCode::kAllReduce) {
      steady.emplace_back(p.ShapeOf(op).dtype, p.ShapeOf(op).bytes.value);
    }
  }
  const std::int64_t wide = 3 * 1024 * kib, narrow = 17 * 512 * kib + stem;
  CHECK(steady == std::vector<std::pair<DType, std::int64_t>>{
                      {DType::kFp32, 1024 * kib},
                      {DType::kBf16, 1024 * kib},  // its first one, of 1 MiB, too
                      {DType::kBf16, narrow - 1024 * kib},
                      {DType::kFp32, wide - 1024 * kib}});
  std::int64_t shard = 0, states = 0;
  for (const Buffer& b : p.buffers) {
    shard += b.category == Category::kParameterShard ? b.size.value : 0;
    states += b.category == Category::kOptimizerState ? b.size.value : 0;
  }
  CHECK(shard == wide + narrow);
  CHECK(states == 2 * (wide + narrow));
}

// bitsandbytes and torchao, by their sources: 8 bits and fp32 per 256 elements; 4 bits per 128.
TEST_CASE("Packed optimizer states: blocks, thresholds and embeddings") {
  const auto bytes = [](StateFormat format, std::int64_t n, bool embeds = false) {
    const StateSize size = SizeOfState(format, n, embeds, DType::kBf16);
    return size.codes.value + size.scales.value;
  };
  CHECK(bytes(StateFormat::kMaster, 5000) == 10000);
  CHECK(bytes(StateFormat::kBnb8, 4095) == 4 * 4095);
  CHECK(bytes(StateFormat::kBnb8, 4096) == 4096 + 16 * 4);
  CHECK(bytes(StateFormat::kBnb8, 4097) == 4097 + 17 * 4);
  CHECK(bytes(StateFormat::kBnb8Paged, 8192, true) == 4 * 8192);
  CHECK(bytes(StateFormat::kBnb32Paged, 8192) == 4 * 8192);
  CHECK(bytes(StateFormat::kAo8, 4352, true) == 4352 + 17 * 4);
  CHECK(bytes(StateFormat::kAo8, 4353) == 2 * 4353);
  CHECK(bytes(StateFormat::kAo4, 4224) == 2112 + 33 * 4);
  CHECK(bytes(StateFormat::kAo4, 2048) == 2 * 2048);
  // 4.5 and 4.127 bits per weight, as the papers count.
  const std::int64_t n = std::int64_t{1} << 24;
  const auto bits = [&](FrozenFormat format) {
    const QuantizedSize size = SizeOfQuantized(format, n, 4096);
    return 8.0 * static_cast<double>((size.packed + size.scales).value) / static_cast<double>(n);
  };
  CHECK(bits(FrozenFormat::kNf4) == doctest::Approx(4.5).epsilon(1e-4));
  CHECK(bits(FrozenFormat::kNf4Double) == doctest::Approx(4.127).epsilon(1e-4));
  CHECK(bits(FrozenFormat::kInt8) == doctest::Approx(8.0 + 32.0 / 4096.0).epsilon(1e-6));
}

TEST_CASE("Optimizers by Transformers' words, and back") {
  for (const std::string_view word : OptimizerWords()) {
    CAPTURE(std::string(word));
    const std::string_view back = WordOf(*OptimizerNamed(word));
    CHECK(OptimizerNamed(back) == OptimizerNamed(word));
  }
  CHECK(!OptimizerNamed("lomo"));
}

// The chain with a bias in every layer.
Model BiasedChain(const ChainSpec& spec) {
  Model model = ChainModel(spec);
  for (ModelOp& op : model.ops) {
    op.params.push_back(AddParam(model, op.module, "bias", {spec.width}));
  }
  return model;
}

Plan DdpPlan(const ChainSpec& spec, Bytes bucket) {
  Plan plan = ChainPlan(spec, Dialect::kDdp, 1);
  plan.units = {UnitPlan(plan.units.back())};
  plan.replicate_size = 2;
  plan.first_bucket = plan.bucket = bucket;
  return plan;
}

// autograd has the gradient of a bias before that of its weight
// (tests/schedule/torch_ddp_random.py).
TEST_CASE("DDP buckets end between the parameters of an op") {
  ChainSpec spec;
  spec.blocks = 2;
  spec.width = spec.stem = 8;  // weights of 256 bytes, biases of 32
  const Model model = BiasedChain(spec);
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const auto reduced = [&](std::int64_t bucket) {
    const Program p =
        Lower({model, kernels, ChainJob(spec, kAllFp32), DdpPlan(spec, Bytes(bucket))});
    CHECK(Verify(p).empty());
    return ReducedBy(p, p.step);
  };
  CHECK(reduced(32) == Sizes{32, 256, 32, 256, 32, 256});
  // Block 1 and the bias of block 0; its weight and the stem.
  CHECK(reduced(300) == Sizes{256 + 2 * 32, 2 * 256 + 32});
}

TEST_CASE("DDP refuses what reaches no loss, unless it is frozen") {
  ChainSpec spec;
  spec.blocks = 2;
  Model model = ChainModel(spec);
  model.tensors[model.ops[1].outputs.front().value].role = TensorRole::kLoss;  // of block 0
  model.ops[2].inputs = model.ops[1].inputs;                                   // beside it
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const auto lower = [&](std::int64_t ranks) {
    Plan plan = DdpPlan(spec, Bytes(1024));
    plan.replicate_size = ranks;
    return Lower({model, kernels, ChainJob(spec, kAllFp32), plan});
  };
  CHECK_THROWS_WITH_AS(
      (void)lower(2),
      "plan: dialect: got ddp with trainable parameter \"block1.lin0.weight\", which reaches no "
      "loss, expected one that gets a gradient, or is frozen; torch waits for it and stops in the "
      "second step: Expected to have finished reduction in the prior iteration; "
      "find_unused_parameters or static_graph reduces zeros for it",
      InputError);
  CHECK(Verify(lower(1)).empty());  // nothing is reduced
  model.params.back().trainable = false;
  CHECK(Verify(lower(2)).empty());
}

// Stem, blocks 0, 1 and 2 of 256 bytes each, of which block 1 reaches no loss
// (tests/schedule/torch_ddp_random.py has such cases). torch reduces zeros for it, and an int32 per
// parameter that says which have a gradient.
TEST_CASE("DDP reduces zeros for what reaches no loss, where it looks for that") {
  ChainSpec spec;
  spec.blocks = 3;
  spec.width = spec.stem = 8;
  const Model model = ChainWithDroppedBlock(spec, false);
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const auto lower = [&](Plan plan) {
    Program p = Lower({model, kernels, ChainJob(spec, kAllFp32), plan});
    CHECK(Verify(p).empty());
    return p;
  };
  Plan looks = DdpPlan(spec, Bytes(300));
  looks.find_unused_parameters = true;
  looks.first_bucket = Bytes(200);
  // In the order of the model {stem}, {block 0, block 1}, {block 2}; the last is reduced first.
  const Program dynamic = lower(looks);
  CHECK(dynamic.warmup.ops.empty());
  CHECK(ReducedBy(dynamic, dynamic.step) == Sizes{256, 512, 256, 16});
  // The map says what it is, and Verify asks for it.
  Program silent = dynamic;
  for (Buffer& b : silent.buffers) {
    b.holds = b.holds == Holds::kUses ? Holds::kOther : b.holds;
  }
  REQUIRE(!Verify(silent).empty());
  CHECK(Verify(silent).front().rule == 1);
  // Bound to no gradient of its own, {block 1} goes when its turn comes.
  looks.bucket = Bytes(200);
  const Program apart = lower(looks);
  CHECK(ReducedBy(apart, apart.step) == Sizes{256, 256, 256, 256, 16});

  Plan fixed = DdpPlan(spec, Bytes(300));
  fixed.static_graph = true;
  // First all at the end, behind the map; then {block 2, block 0}, {stem, block 1}.
  const Program once = lower(fixed);
  CHECK(ReducedBy(once, once.warmup) == Sizes{16, 1024});
  CHECK(ReducedBy(once, once.step) == Sizes{512, 512});
  // The second pass has the first one's bucket still, and finds out the order.
  fixed.accumulation = 3;
  const Program thrice = lower(fixed);
  CHECK(ReducedBy(thrice, thrice.warmup) == Sizes{16, 1024, 1024, 512, 512});
  CHECK(ReducedBy(thrice, thrice.step) == Sizes{512, 512, 512, 512, 512, 512});
  // Nothing is updated that has no gradient.
  const auto updated = [](const Program& p) {
    std::int64_t bytes = 0;
    for (const Buffer& b : p.buffers) {
      bytes += b.category == Category::kOptimizerState ? b.size.value : 0;
    }
    return bytes;
  };
  CHECK(updated(once) == 2 * 3 * 256);  // AdamW's two moments
}

TEST_CASE("DDP refuses a static graph whose first micro-batch does not reduce") {
  ChainSpec spec;
  spec.blocks = 1;
  Plan plan = DdpPlan(spec, Bytes(1024));
  plan.static_graph = true;
  plan.accumulation = 2;
  plan.sync = SyncMode::kLast;
  const Model model = ChainModel(spec);
  CHECK_THROWS_WITH_AS(ValidatePlan(model, ChainJob(spec, kAllFp32), plan, "p"),
                       "p: static_graph: got true with 2 micro-batches that reduce on the last "
                       "one, expected sync \"every\", or find_unused_parameters; torch fails with "
                       "no_sync before its first reduction: expect_autograd_hooks_ INTERNAL ASSERT "
                       "FAILED",
                       InputError);
  plan.accumulation = 1;
  CHECK_NOTHROW(ValidatePlan(model, ChainJob(spec, kAllFp32), plan, "p"));
}

// A stem of 64 x 8 and four products of 64 x 64, of which the second learns and the others are
// frozen in 4 bits. The third and the fourth, which a gradient passes through, are made whole again
// for backward; before the second nothing learns.
TEST_CASE("Quantized weights are whole while their op runs") {
  ChainSpec spec;
  Model model = ChainModel(spec);
  for (Parameter& param : model.params) {
    param.trainable = param.fqn.starts_with("block1");
  }
  Job job = ChainJob(spec, kMixed);
  job.frozen_format = FrozenFormat::kNf4;
  const Program program =
      Lower({model, FindKernelSet("torch-eager", "test"), job, DdpPlan(spec, kMiB)});
  CHECK(Verify(program).empty());
  std::int64_t forward = 0, backward = 0, shard = 0, scales = 0;
  std::set<std::int64_t> whole;
  for (const Op& op : program.step.ops) {
    const bool makes_whole = program.ShapeOf(op).code == OpCode::kCast;
    forward += makes_whole && op.phase == Phase::kForward ? 1 : 0;
    backward += makes_whole && op.phase == Phase::kBackward ? 1 : 0;
  }
  for (const Buffer& b : program.buffers) {
    shard += b.category == Category::kParameterShard ? b.size.value : 0;
    scales += b.category == Category::kModelBuffer ? b.size.value : 0;
    if (b.category == Category::kTemporary && b.holds == Holds::kTensors) {
      whole.insert(b.size.value);
    }
  }
  const std::int64_t square = 64 * 64, stem = 64 * 8;
  CHECK(shard == 4 * square + (3 * square + stem) / 2);
  CHECK(scales == 4 * ((3 * square + stem) / 64 + 4 * 16));
  CHECK(forward == 5);  // and the one that learns is cast for autocast
  CHECK(backward == 2);
  CHECK(whole == std::set<std::int64_t>{2 * stem, 2 * square});
}

// Transformers' Adafactor keeps a row and a column of each matrix, under FSDP1 one element per
// element of the flat shard.
TEST_CASE("Adafactor's states") {
  ChainSpec spec;
  const Model model = ChainModel(spec);
  Job job = ChainJob(spec, kAllFp32);
  job.optimizer = *OptimizerNamed("adafactor");
  const auto states = [&](const Plan& plan) {
    const Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
    CHECK(Verify(program).empty());
    std::int64_t bytes = 0;
    for (const Buffer& b : program.buffers) {
      bytes += b.category == Category::kOptimizerState ? b.size.value : 0;
    }
    return bytes;
  };
  CHECK(states(DdpPlan(spec, kMiB)) == 4 * (4 * (64 + 64) + 64 + 8));
  CHECK(states(ChainPlan(spec, Dialect::kFsdp1, 1)) == 4 * (4 * 64 * 64 + 64 * 8));
  CHECK_THROWS_WITH_AS(
      ValidatePlan(model, job, ChainPlan(spec, Dialect::kFsdp2, 2), "p"),
      "p: got a job with optimizer.kind \"adafactor\", expected dialect ddp or "
      "fsdp1; Transformers' Adafactor mixes tensors of its own with those of FSDP2",
      InputError);
  job.optimizer.impl = OptimizerImpl::kForeach;
  CHECK_THROWS_AS(ValidatePlan(model, job, DdpPlan(spec, kMiB), "p"), InputError);
}

// Mixtral's experts are 96 % of it. In 4 bits they are made whole all at once, 8 x 3 x 4096 x 14336
// weights of a layer, and only a recomputed layer lets go of them.
TEST_CASE("Quantized experts are whole while their layer runs") {
  Model model = LoadModel("mixtral-8x7b", {.sequence_length = 64});
  ApplyTrainable(model, {.lora_rank = 8, .lora_targets = {"q_proj"}}, Path("job"));
  Job job;
  job.sequence_length = 64;
  job.precision = kMixed;
  job.frozen_format = FrozenFormat::kNf4;
  job.quantized_experts = true;
  Plan plan;
  plan.dialect = Dialect::kDdp;
  plan.units.emplace_back().modules = {""};
  plan.units[0].name = "root";
  plan.units[0].reshard.kind = Reshard::Kind::kNever;
  CHECK_THROWS_WITH_AS(ValidatePlan(model, job, plan, "p"),
                       "p: got a job with quantized_experts \"true\", expected a fully recomputed "
                       "region around all experts; their copies in 16 bits are kept for backward "
                       "otherwise",
                       InputError);
  for (const Module& module : model.modules) {
    if (module.class_name == model.block_classes.at(0)) {
      plan.recompute.emplace_back().module = module.fqn;
    }
  }
  ValidatePlan(model, job, plan, "p");
  const Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  CHECK(Verify(program).empty());
  std::int64_t shard = 0, largest = 0;
  for (const Buffer& b : program.buffers) {
    shard += b.category == Category::kParameterShard ? b.size.value : 0;
    const bool is_whole = b.category == Category::kTemporary && b.holds == Holds::kTensors;
    largest = is_whole ? std::max(largest, b.size.value) : largest;
  }
  constexpr std::int64_t kExperts = std::int64_t{8} * 3 * 4096 * 14336;
  constexpr std::int64_t kAttention = std::int64_t{2} * 4096 * 4096 + 2 * 4096 * 1024;
  constexpr std::int64_t kWhole = 2 * 32000 * 4096 + 32 * (8 * 4096 + 2 * 4096) + 4096;  // router
  constexpr std::int64_t kAdapters = 32 * 8 * (4096 + 4096);
  CHECK(shard == 32 * (kExperts + kAttention) / 2 + 2 * kWhole + 4 * kAdapters);
  CHECK(largest == 2 * kExperts);
}

}  // namespace
}  // namespace shardwright
