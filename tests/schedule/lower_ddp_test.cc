// DDP programs against hand computation: docs/lowering.md, section ddp.

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/lower.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

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
    std::vector<std::int64_t> bytes;
    for (const Op& op : p.step.ops) {
      if (p.ShapeOf(op).code == OpCode::kAllReduce) {
        bytes.push_back(p.ShapeOf(op).bytes.value);
      }
    }
    return bytes;
  };
  CHECK(reduced(32) == std::vector<std::int64_t>{32, 256, 32, 256, 32, 256});
  // Block 1 and the bias of block 0; its weight and the stem.
  CHECK(reduced(300) == std::vector<std::int64_t>{256 + 2 * 32, 2 * 256 + 32});
}

TEST_CASE("DDP refuses what reaches no loss, unless it is frozen") {
  ChainSpec spec;
  spec.blocks = 2;
  Model model = ChainModel(spec);
  model.tensors[model.ops[1].outputs.front().value].role = TensorRole::kLoss;  // of block 0
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
      "find_unused_parameters has other buckets than our programs",
      InputError);
  CHECK(Verify(lower(1)).empty());  // nothing is reduced
  model.params.back().trainable = false;
  CHECK(Verify(lower(2)).empty());
}

}  // namespace
}  // namespace shardwright
