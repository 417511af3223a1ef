// FSDP1 programs against hand computation: docs/lowering.md, section fsdp1.

#include <array>
#include <cstdint>
#include <random>
#include <string>

#include <doctest/doctest.h>

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

}  // namespace
}  // namespace shardwright
