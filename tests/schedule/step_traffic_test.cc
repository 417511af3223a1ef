// What a whole training step of an 8B model moves through a GPU's memory, against the least that
// its operations need, by hand.

#include <cstdint>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/lower/optimizer.h"
#include "schedule/wrap.h"

namespace shardwright {
namespace {

constexpr std::int64_t kTokens = 2048, kMicroBatch = 4, kMicroBatches = 8;
constexpr double kHalf = 2;  // bytes of a bf16 number

// Every operand of every operation once. Beside an operation's own operands: residual sums are made
// by the norms that read them, and in backward those norms, and products with a common input, add
// to the gradient that is there; a later micro-batch's weight gradients add to the earlier ones'.
double LeastBytes() {
  const double rows = static_cast<double>(kMicroBatch * kTokens);
  const double wide = 4096, feed = 14336, key = 1024, vocabulary = 128256, layers = 32;
  const double a = rows * wide * kHalf, g = rows * feed * kHalf, k = rows * key * kHalf;
  const double logits = rows * vocabulary * kHalf;
  // norm 4a (two in, sum and result out); q, k, v 4a 2k; rope 2a 2k; attention 2a 2k; output 2a;
  // norm 4a; gate and up 2a 2g; their product 3g; down a g.
  const double forward = 21 * a + 6 * k + 6 * g;
  // down 2a 2g; product 5g; up 2a 2g; gate 3a 2g; norm 4a (x, dy, and dx is added to); output 4a;
  // attention 4a 4k; rope 2a 2k; q 4a; k and v 6a 4k; norm 4a.
  const double backward = 35 * a + 10 * k + 11 * g;
  // Embedding: rows in and out, and backward adds to rows. Last norm 4a and 3a. Head and loss.
  const double ends = (2 + 3 + 7) * a + (a + logits) + 3 * logits + 2 * (logits + a);
  const double matrices = layers * (2 * wide * wide + 2 * wide * key + 3 * wide * feed) * kHalf;
  const double table = vocabulary * wide * kHalf;
  const double passes = kMicroBatches;
  const double weights = 2 * passes * (matrices + table);
  // The first micro-batch writes gradients, the others read and write them; the embedding's are
  // zeros first.
  const double gradients = (2 * passes - 1) * (matrices + table) + table;
  // Norm of gradients, clipping, AdamW: 1 + 2 + 7.
  const double update = 10 * (matrices + 2 * table);
  return passes * (layers * (forward + backward) + ends) + weights + gradients + update;
}

TEST_CASE("A step of 8B moves at most a tenth more than it must") {
  const Model model = LoadModel("llama-3.1-8b", {.sequence_length = kTokens});
  Job job;
  job.sequence_length = kTokens;
  job.precision = {DType::kBf16, DType::kBf16, DType::kBf16};
  job.optimizer.kind = OptimizerKind::kAdamW;
  job.optimizer.impl = OptimizerImpl::kFused;
  Plan plan;
  plan.dialect = Dialect::kNative;
  plan.micro_batch = kMicroBatch;
  plan.accumulation = kMicroBatches;
  plan.sync = SyncMode::kLast;
  plan.units = Wrap(model, ParseWrap("block", "test"), {true, {Reshard::Kind::kNever, 0}},
                    Dialect::kNative, "test");
  const Program p = Lower({model, FindKernelSet("shardwright-cuda-fused", "test"), job, plan});
  double moved = 0;
  for (const Op& op : p.step.ops) {
    const OpShape& shape = p.shapes[op.shape.value];
    for (const Kernel& kernel : p.KernelsOf(shape)) {
      moved += static_cast<double>((kernel.read + kernel.written).value);
    }
  }
  // The gradient of a norm's weight is a pass of its own, which prices leave out: x and dy again.
  // (What else the kernels move is what they are priced by:
  // CudaKernels.MoveLittleMoreThanTheyMust.)
  const double norms = 65, activation = static_cast<double>(kMicroBatch * kTokens) * 4096 * kHalf;
  moved += kMicroBatches * norms * 2 * activation;
  MESSAGE("moved " << moved / 1e12 << " TB, at least " << LeastBytes() / 1e12);
  CHECK(moved <= 1.1 * LeastBytes());
  CHECK(moved >= 0.97 * LeastBytes());  // else something is left out of one of them
}

// Weight, gradient and states in, weight and states out; what torch has no fused kernel for, ours
// do.
TEST_CASE("A fused update reads and writes each tensor once") {
  constexpr std::int64_t kElements = 4096;
  struct Row {
    OptimizerKind kind;
    std::int64_t states;
  };
  for (const Row& row : {Row{OptimizerKind::kSgd, 0}, Row{OptimizerKind::kMomentum, 1},
                         Row{OptimizerKind::kAdam, 2}, Row{OptimizerKind::kAdamW, 2},
                         Row{OptimizerKind::kAdadelta, 2}, Row{OptimizerKind::kLion, 1}}) {
    CAPTURE(static_cast<int>(row.kind));
    const OptimizerStep step = LowerOptimizer({row.kind, OptimizerImpl::kFused, true}, kElements, 1,
                                              kElements, DType::kFp32);
    REQUIRE(step.kernels.size() == 1);
    CHECK(step.kernels[0].read == Bytes((2 + row.states) * kElements * 4));
    CHECK(step.kernels[0].written == Bytes((1 + row.states) * kElements * 4));
    CHECK(step.temporaries == Bytes(0));
    CHECK(StateCount(row.kind) == row.states);
  }
}

}  // namespace
}  // namespace shardwright
