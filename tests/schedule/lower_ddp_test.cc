// DDP programs against hand computation: docs/lowering.md, section ddp.

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

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

}  // namespace
}  // namespace shardwright
