// What lives on the host, in lowered programs against hand computation. The rules are those of
// docs/lowering.md.

#include <algorithm>
#include <cstdint>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

TEST_CASE("Offload: shards, gradients and states live on the host") {
  ChainSpec spec;
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Plan plan = ChainPlan(spec, dialect, 4);
    plan.offload.parameters = true;
    const Program p = LowerChain(spec, plan, kMixed);
    CHECK(Of(AliveAt(p, "mb0.block2.lin0.fwd"), Category::kParameterShard) == 0);
    CHECK(Count(p, OpCode::kHostOptimizerStep) == 1);
    CHECK(Count(p, OpCode::kOptimizerStep) == 0);
    CHECK(Count(p, OpCode::kCopyD2h) == 5);
  }
  Plan plan = ChainPlan(spec, Dialect::kNative, 4);
  plan.offload.optimizer = true;
  const Program p = LowerChain(spec, plan, kMixed);
  CHECK(Count(p, OpCode::kHostOptimizerStep) == 1);
  CHECK(Of(AliveAt(p, "opt.host_optimizer_step"), Category::kOptimizerState) == 0);
}

// What torch's clip_grad_norm_ sends: FSDP1 one fp32 number over the shards, from the device
// (fully_sharded_data_parallel.py), FSDP2 one per parameter in the master dtype. The host waits for
// it and updates.
TEST_CASE("Offload: the norm of gradients on the host is summed over the shards") {
  const ChainSpec spec;  // five parameters
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1}) {
    CAPTURE(NameOf(dialect));
    Plan plan = ChainPlan(spec, dialect, 4);
    plan.offload.parameters = true;
    const Program p = LowerChain(spec, plan, kMixed, [](Job& job) { job.clip_gradients = true; });
    CHECK(Verify(p).empty());
    REQUIRE(p.step.size() >= 3);
    const auto last = [&](std::size_t n) -> const OpShape& {
      return p.ShapeOf(p.step.ops[p.step.size() - n]);
    };
    CHECK(last(1).code == OpCode::kHostOptimizerStep);
    CHECK(last(2).code == OpCode::kHostWait);
    CHECK(last(3).code == OpCode::kAllReduce);
    CHECK(last(3).bytes == Bytes(dialect == Dialect::kFsdp2 ? 5 * 4 : 4));
    plan.shard_size = 1;
    plan.replicate_size = 4;
    const Program alone =
        LowerChain(spec, plan, kMixed, [](Job& job) { job.clip_gradients = true; });
    CHECK(Count(alone, OpCode::kGradNorm) == 0);
  }
}

TEST_CASE("Offload: FSDP1 does not add up what it has sent to the host") {
  const ChainSpec spec;
  Plan plan = ChainPlan(spec, Dialect::kFsdp1, 4);
  plan.offload.parameters = true;
  plan.accumulation = 3;
  const char* const text =
      "p: offload.parameters: got true with 3 micro-batches that reduce each, expected sync "
      "\"last\", or one micro-batch; FSDP1 adds nothing to gradients that are on the host: a "
      "micro-batch's take the place of those of the one before";
  CHECK_THROWS_WITH_AS(ValidatePlan(ChainModel(spec), ChainJob(spec, kMixed), plan, "p"), text,
                       InputError);
  plan.sync = SyncMode::kLast;
  CHECK(Count(LowerChain(spec, plan, kMixed), OpCode::kHostOptimizerStep) == 1);
}

// FSDP2 without a gather: wait_for_unshard copies each shard to the device on the compute stream
// (all_gather_inputs of _fsdp_param.py, torch 2.13), then casts it. Every block does so in forward
// and in backward, the root in forward alone.
TEST_CASE("Offload: one rank's parameters cross the host link, too") {
  const ChainSpec spec;
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    CAPTURE(NameOf(dialect));
    Plan plan = ChainPlan(spec, dialect, 1);
    plan.offload.parameters = true;
    const Program p = LowerChain(spec, plan, kMixed);
    for (const Finding& finding : Verify(p)) {
      FAIL_CHECK(finding.text);
    }
    std::int64_t copied = 0;
    for (const Op& op : p.step.ops) {
      const OpShape& s = p.ShapeOf(op);
      copied += s.code == OpCode::kCopyH2d && op.subject != kNoSubject ? s.bytes.value : 0;
    }
    if (dialect == Dialect::kFsdp2) {
      CHECK(copied == (2 * 4 * 64 * 64 + 64 * 8) * 4);
    } else {
      CHECK(copied > 0);
    }
  }
}

TEST_CASE("Offload: moments visit the device piece by piece") {
  // Fp32 AdamW: 1,024 elements of each block on each of four ranks, in pieces of 256 elements with
  // two moments each, and the stem's 128 in one piece.
  ChainSpec spec;
  constexpr std::int64_t kPiece = 2048;
  constexpr int kPieces = 4 * 4 + 1;
  for (const bool clips : {false, true}) {
    CAPTURE(clips);
    Plan plan = ChainPlan(spec, Dialect::kNative, 4);
    plan.offload.moments = true;
    plan.moments_piece = Bytes(kPiece + 7);
    const Program p = LowerChain(spec, plan, kMixed, [&](Job& job) { job.clip_gradients = clips; });
    int there = 0, back = 0;
    for (const Op& op : p.step.ops) {
      const OpShape& s = p.ShapeOf(op);
      there += s.stream == Stream::kH2d && s.code == OpCode::kCopyH2d ? 1 : 0;
      back += s.stream == Stream::kD2h ? 1 : 0;
    }
    CHECK(there == kPieces);
    CHECK(back == kPieces);
    CHECK(Count(p, OpCode::kOptimizerStep) == kPieces);
    // In the last update both pieces that may be in flight are there: the stem's (the root's, last
    // without clipping and first with it) or a block's, and a block's.
    const Bytes64 alive =
        AliveAt(p, clips ? "block3.opt.optimizer_step#3" : "root.opt.optimizer_step");
    CHECK(Of(alive, Category::kOptimizerState) == (clips ? 2 * kPiece : kPiece + 128 * 8));
    CHECK(Of(alive, Category::kParameterShard) == (4 * 1024 + 128) * 4);
    Bytes host;
    for (const Buffer& b : p.buffers) {
      host += b.on_host && b.category == Category::kOptimizerState ? b.size : Bytes(0);
    }
    CHECK(host == Bytes((4 * 1024 + 128) * 8));
  }
}

TEST_CASE("Pieces of a unit's moments are alike") {
  // 1,024 elements of eight bytes in pieces of at most 1,000 elements: two of 512.
  ChainSpec spec;
  Plan plan = ChainPlan(spec, Dialect::kNative, 4);
  plan.offload.moments = true;
  plan.moments_piece = Bytes(1000 * 8);
  const Program p = LowerChain(spec, plan, kMixed);
  for (const Op& op : p.step.ops) {
    const OpShape& s = p.ShapeOf(op);
    CHECK((s.stream != Stream::kD2h || s.bytes == Bytes(512 * 8) || s.bytes == Bytes(128 * 8)));
  }
}

TEST_CASE("Offload: the host's update moves what the optimizer's passes move") {
  ChainSpec spec;
  Plan plan = ChainPlan(spec, Dialect::kNative, 4);
  plan.offload.optimizer = true;
  const Program p =
      LowerChain(spec, plan, kMixed, [](Job& job) { job.optimizer.impl = OptimizerImpl::kFused; });
  const auto update = std::find_if(p.shapes.begin(), p.shapes.end(), [](const OpShape& shape) {
    return shape.code == OpCode::kHostOptimizerStep;
  });
  REQUIRE(update != p.shapes.end());
  Bytes read, written;
  for (const Kernel& kernel : p.KernelsOf(*update)) {
    read += kernel.read;
    written += kernel.written;
  }
  // Fused AdamW in fp32 on a quarter of four 64 x 64 weights and the stem's 64 x 8: reads
  // parameter, gradient and two states, writes all but the gradient.
  const std::int64_t elements = (4 * 64 * 64 + 64 * 8) / 4;
  CHECK(read == Bytes(elements * 4 * 4));
  CHECK(written == Bytes(elements * 3 * 4));
}

TEST_CASE("Offloaded activations: two layers' worth on the device, the rest on the host") {
  // Each block's three linears keep three inputs of t bytes: 24 in all, counting the stem's output.
  // Blocks 7 (the first of backward) keeps its own; while block b computes, what block b - 1 copied
  // out may still be there and b - 2's is gone.
  ChainSpec spec;
  spec.blocks = 8;
  spec.linears = 3;
  spec.rows = 32;
  const std::int64_t t = spec.rows * spec.width * 2;
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 4);
  const std::string last = "mb0.block7.lin2.fwd";
  CHECK(Of(AliveAt(LowerChain(spec, plan, kMixed), last), Category::kActivation) == 24 * t);
  plan.offload.activations = true;
  const Program p = LowerChain(spec, plan, kMixed);
  // Block 7 keeps its input and two inner tensors, all on the device; block 6's three inputs are
  // being copied out.
  CHECK(Of(AliveAt(p, last), Category::kActivation) == 6 * t);
  // 21 tensors travel: all inputs but those that block 7 reads.
  int out = 0, back = 0;
  for (const Op& op : p.step.ops) {
    const OpShape& s = p.ShapeOf(op);
    out += s.code == OpCode::kCopyD2h ? 1 : 0;
    back += s.code == OpCode::kCopyH2d && s.stream == Stream::kH2d ? 1 : 0;
  }
  CHECK(out == 21);
  CHECK(back == 21);
  // Moments come on the stream that brought them back, and may get their bytes.
  plan.dialect = Dialect::kNative;
  plan.offload.moments = true;
  for (const bool clips : {false, true}) {
    const Program both =
        LowerChain(spec, plan, kMixed, [&](Job& job) { job.clip_gradients = clips; });
    CHECK(Count(both, OpCode::kCopyD2h) == 21 + 9);  // of eight blocks and the stem
    CHECK(Verify(both).empty());
  }
}

}  // namespace
}  // namespace shardwright
