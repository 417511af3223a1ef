// The ZeRO stages against hand computation: what is resident, what is alive at which moment, how
// many collectives of which size a step issues. Rules: docs/lowering.md.

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/model.h"
#include "schedule/lower/fetch_order.h"
#include "schedule/lower/layout.h"
#include "schedule/wrap.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model and its questions

// DeepSpeed sums the norm of all gradients in each step, clipped or not.
constexpr std::int64_t kNorm = 4;

std::int64_t Draw(std::mt19937& random, std::int64_t low, std::int64_t high) {
  return std::uniform_int_distribution<std::int64_t>(low, high)(random);
}

// One linear per block: blocks of n = width^2 elements behind a stem of 8 * width.
Plan ZeroPlan(const ChainSpec& spec, Dialect dialect, std::int64_t ranks) {
  Plan plan;
  plan.dialect = dialect;
  plan.shard_size = ranks;
  plan.units = Wrap(ChainModel(spec), ParseWrap(DefaultWrap(dialect), "test"), {}, dialect, "test");
  plan.zero.reduce_bucket = spec.width * spec.width;
  if (dialect == Dialect::kZero3) {
    plan.zero.persistence_threshold = 0;
  }
  return plan;
}

// Greedy buckets over L gradients of n elements and the smaller stem, k of them at once: the stem
// joins the last bucket unless that is full.
std::int64_t BucketCount(std::int64_t blocks, std::int64_t per_bucket) {
  return blocks % per_bucket == 0 ? blocks / per_bucket + 1 : CeilDiv(blocks, per_bucket);
}

std::int64_t BytesOf(const Program& p, OpCode code) {
  std::int64_t bytes = 0;
  for (const Op& op : p.step.ops) {
    bytes += p.ShapeOf(op).code == code ? p.ShapeOf(op).bytes.value : 0;
  }
  return bytes;
}

TEST_CASE("ZeRO layouts: partitions of the trainable part, or of each parameter") {
  Model model;
  const ModuleId root = AddModule(model, {}, "", "Root");
  AddParam(model, root, "a", {5});
  AddParam(model, root, "frozen", {7});
  AddParam(model, root, "b", {3, 3});
  model.params[1].trainable = false;
  const ResolvedUnit unit{"root", {root}, {ParamId(0), ParamId(1), ParamId(2)}};
  // 14 trainable elements over 4 ranks are padded to a multiple of 8: 16, 4 per rank; the frozen 7
  // stand behind them.
  const UnitInfo flat = LayoutPartitioned(model, unit, 4);
  CHECK(flat.shard_elements == 4);
  CHECK(flat.padded_elements == 16 + 7);
  CHECK(flat.elements == 21);
  CHECK(flat.params[1].param == ParamId(2));
  CHECK(flat.params[1].unsharded_offset == 5);
  CHECK(flat.params[2].unsharded_offset == 16);
  // Each on its own: 5 -> 8, 7 -> 8, 9 -> 12.
  const UnitInfo each = LayoutPerParameterFlat(model, unit, 4);
  CHECK(each.shard_elements == 2 + 2 + 3);
  CHECK(each.padded_elements == 28);
  CHECK(each.params[2].shard_offset == 4);
  CHECK(each.params[2].unsharded_offset == 16);
}

TEST_CASE("ZeRO residents in mixed precision") {
  // Per element: p = 2 for weights, 4 for masters, 8 for AdamW's states.
  ChainSpec spec;
  spec.blocks = 4;
  spec.width = 64;
  const std::int64_t n = spec.width * spec.width, all = 4 * n + spec.width * spec.stem;
  const auto clip = [](Job& job) { job.clip_gradients = true; };
  for (const Dialect dialect : {Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    CAPTURE(NameOf(dialect));
    const Program p = LowerChain(spec, ZeroPlan(spec, dialect, 4), kMixed, clip);
    const bool third = dialect == Dialect::kZero3;
    const Bytes64 norm = AliveAt(p, "opt.grad_norm");
    CHECK(Of(norm, Category::kParameterShard) == all / 4 * (third ? 2 + 4 : 4));
    CHECK(Of(norm, Category::kUnshardedParameter) == (third ? 0 : all * 2));
    CHECK(Of(norm, Category::kOptimizerState) == all / 4 * 8);
    CHECK(Of(norm, Category::kShardedGradient) == all / 4 * 2);
    CHECK(Of(norm, Category::kUnshardedGradient) == 0);
    // The bucket lives as long as the model in stage 3, and for one backward pass before.
    CHECK(Of(norm, Category::kReduceScatter) == (third ? n * 2 : 0));
    // The gradients in the master dtype are there for the update; stage 3 keeps the others.
    const Bytes64 update =
        AliveAt(p, third ? "stem.opt.optimizer_step" : "root.opt.optimizer_step");
    CHECK(Of(update, Category::kShardedGradient) == all / 4 * (third ? 2 + 4 : 4));
  }
}

TEST_CASE("ZeRO-1 and ZeRO-2: buckets, gradients alive, bytes moved") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 40; ++trial) {
    ChainSpec spec;
    spec.blocks = static_cast<int>(Draw(random, 3, 9));
    spec.width = 16 * Draw(random, 1, 6);
    const std::int64_t w = std::int64_t{1} << Draw(random, 1, 3), k = Draw(random, 1, 4);
    const std::int64_t n = spec.width * spec.width, stem = spec.width * spec.stem;
    const std::int64_t all = spec.blocks * n + stem;
    CAPTURE(trial);
    Plan plan = ZeroPlan(spec, Dialect::kZero2, w);
    plan.replicate_size = 2;
    plan.zero.reduce_bucket = k * n;
    Program p = LowerChain(spec, plan, kMixed);
    // Sums over all ranks in fp32; weights are gathered inside the shard group.
    CHECK(Count(p, OpCode::kAllReduce, "world") == BucketCount(spec.blocks, k));
    CHECK(BytesOf(p, OpCode::kAllReduce) == all * 4 + kNorm);
    CHECK(Count(p, OpCode::kAllGather, "shard") == 1);
    CHECK(BytesOf(p, OpCode::kAllGather) == all * 2);
    // Gradients go into the bucket one by one.
    Bytes64 alive = AliveAt(p, "mb0.block1.lin0.bwd");
    CHECK(Of(alive, Category::kUnshardedGradient) == n * 2);
    CHECK(Of(alive, Category::kReduceScatter) == k * n * 2);
    // At an all-reduce the bucket's copy in the reduce dtype is there, too. The first bucket holds
    // k blocks, or all and the stem.
    const std::int64_t first = std::min(k * n, all);
    alive = AliveAt(p, "mb0.root.bwd.all_reduce");
    CHECK(Of(alive, Category::kReduceScatter) == k * n * 2 + first * 4);
    // Two buckets with overlap.
    plan.zero.overlap_comm = Overlap::kOn;
    p = LowerChain(spec, plan, kMixed);
    alive = AliveAt(p, "mb0.block1.lin0.bwd");
    CHECK(Of(alive, Category::kReduceScatter) == 2 * k * n * 2);
    // Weights in pieces of b elements: b / W of each rank's partition at once.
    const std::int64_t b = w * Draw(random, 1, n);
    plan.zero.allgather_bucket = b;
    p = LowerChain(spec, plan, kMixed);
    CHECK(Count(p, OpCode::kAllGather) == CeilDiv(all / w, b / w));
    CHECK(BytesOf(p, OpCode::kAllGather) == all * 2);
    // Stage 1 reduces when backward is over: all gradients exist by then.
    plan = ZeroPlan(spec, Dialect::kZero1, w);
    plan.zero.reduce_bucket = k * n;
    p = LowerChain(spec, plan, kMixed);
    alive = AliveAt(p, "mb0.root.bwd.bucket_copy");
    CHECK(Of(alive, Category::kUnshardedGradient) == all * 2);
    CHECK(Count(p, OpCode::kAllReduce) >= spec.blocks / k);
  }
}

TEST_CASE("ZeRO-1 and ZeRO-2: a gradient larger than the bucket is cut where partitions meet") {
  // The stem's 4 x 8 weights, then the block's 4 x 4: partitions of 24 elements over two ranks.
  ChainSpec spec;
  spec.blocks = 1;
  spec.width = 4;
  spec.stem = 8;
  const auto sums = [&](Dialect dialect, std::int64_t bucket, bool contiguous) {
    Plan plan = ZeroPlan(spec, dialect, 2);
    plan.zero.reduce_bucket = bucket;
    plan.zero.contiguous_gradients = contiguous;
    const Program p = LowerChain(spec, plan, kMixed);
    std::vector<std::int64_t> elements;
    for (const Op& op : p.step.ops) {
      const OpShape& shape = p.ShapeOf(op);
      if (shape.code == OpCode::kAllReduce && op.phase == Phase::kBackward) {
        elements.push_back(shape.bytes.value / 4);
      }
    }
    return elements;
  };
  using Elements = std::vector<std::int64_t>;
  CHECK(sums(Dialect::kZero2, 20, true) == Elements{16, 24, 8});
  CHECK(sums(Dialect::kZero1, 20, true) == Elements{24, 8, 16});
  CHECK(sums(Dialect::kZero2, 30, true) == Elements{16, 32});  // the first part is below a bucket
  CHECK(sums(Dialect::kZero2, 20, false) == Elements{16, 32});
}

TEST_CASE("ZeRO-1 and ZeRO-2: accumulation and reduce-scatter") {
  ChainSpec spec;
  spec.blocks = 3;
  const std::int64_t n = spec.width * spec.width, all = 3 * n + spec.width * spec.stem;
  for (const Dialect dialect : {Dialect::kZero1, Dialect::kZero2}) {
    Plan plan = ZeroPlan(spec, dialect, 4);
    plan.accumulation = 3;
    // Stage 1 reduces the last micro-batch and keeps whole gradients before; stage 2 reduces each.
    // Stem and blocks in order (stage 1), or blocks and then the stem: four buckets of one each.
    const int passes = dialect == Dialect::kZero1 ? 1 : 3;
    const Program p = LowerChain(spec, plan, kMixed);
    CHECK(Count(p, OpCode::kAllReduce) == passes * 4 + 1);  // and the norm's
    const Bytes64 alive = AliveAt(p, "mb1.fwd.copy_h2d");
    CHECK(Of(alive, Category::kUnshardedGradient) == (passes == 1 ? all * 2 : 0));
    CHECK(Of(alive, Category::kShardedGradient) == (passes == 1 ? 0 : all / 4 * 2));
    // By units: one reduce-scatter each, of what the reduce dtype needs.
    plan.zero.gradient_reduction = GradientReduction::kReduceScatter;
    plan.units = Wrap(ChainModel(spec), ParseWrap("block", "test"), {}, dialect, "test");
    plan.replicate_size = 2;
    const Program scattered = LowerChain(spec, plan, kMixed);
    CHECK(Count(scattered, OpCode::kReduceScatter, "shard") == passes * 4);
    CHECK(Count(scattered, OpCode::kAllReduce, "replicate") == passes * 4);
    CHECK(BytesOf(scattered, OpCode::kReduceScatter) == passes * all * 4);
    CHECK(Count(scattered, OpCode::kAllGather) == 4);
  }
}

// Without prefetch every use of a module fetches it, unless it was kept since its last use. Block i
// of L comes again in backward after the 2 (L - 1 - i) uses of the blocks behind it; it is kept if
// their elements are fewer than the reuse distance.
TEST_CASE("ZeRO-3: fetches by reuse distance") {
  std::mt19937 random(6);
  for (int trial = 0; trial < 40; ++trial) {
    ChainSpec spec;
    spec.blocks = static_cast<int>(Draw(random, 2, 9));
    spec.width = 16 * Draw(random, 1, 6);
    const std::int64_t n = spec.width * spec.width;
    Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
    plan.zero.prefetch_bucket = 0;
    plan.zero.max_reuse_distance = Draw(random, 0, 2 * (spec.blocks - 1) * n);
    CAPTURE(trial);
    const Program p = LowerChain(spec, plan, kMixed);
    const std::int64_t kept =
        std::min<std::int64_t>(spec.blocks, CeilDiv(plan.zero.max_reuse_distance, 2 * n));
    CHECK(Count(p, OpCode::kAllGather) == 2 * (spec.blocks + 1) - kept);
    CHECK(Count(p, OpCode::kGatherCopyOut) == 0);  // modules of one parameter are gathered in place
    // While the last block runs forward, itself and what was kept before it are there.
    const Bytes64 alive = AliveAt(p, Block(spec.blocks - 1, "lin0.fwd"));
    CHECK(Of(alive, Category::kUnshardedParameter) == std::max<std::int64_t>(kept, 1) * n * 2);
    // The recording pass keeps nothing.
    int recorded = 0;
    for (const Op& op : p.warmup.ops) {
      recorded += p.ShapeOf(op).code == OpCode::kAllGather ? 1 : 0;
    }
    CHECK(recorded == 2 * (spec.blocks + 1));
  }
}

std::int64_t StateBytes(const Program& p, bool on_host) {
  std::int64_t bytes = 0;
  for (const Buffer& buffer : p.buffers) {
    const bool is_state = buffer.category == Category::kOptimizerState;
    bytes += is_state && buffer.on_host == on_host ? buffer.size.value : 0;
  }
  return bytes;
}

// 12 blocks of 4,096 weights and a stem of 512 over 4 ranks: a rank updates 12,416 as one tensor.
// bitsandbytes packs it: 12,416 bytes and 49 scales (256 x 48.5). torchao keeps fp32, since 12,416
// is no multiple of 256. Sub-groups of stage 3 are tensors of their own: 4,096 weights and more
// are packed, fewer stay whole.
TEST_CASE("ZeRO: packed states are those of flat tensors") {
  ChainSpec spec;
  spec.width = 64;
  spec.blocks = 12;
  REQUIRE(spec.stem == 8);
  const auto lowered = [&](Dialect dialect, StateFormat format, std::int64_t sub_group) {
    Plan plan = ZeroPlan(spec, dialect, 4);
    plan.zero.sub_group = dialect == Dialect::kZero3 ? sub_group : plan.zero.sub_group;
    return LowerChain(spec, plan, kMixed, [&](Job& job) { job.optimizer.states = format; });
  };
  constexpr std::int64_t kAll = std::int64_t{1} << 30;
  for (const Dialect dialect : {Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    const auto bytes = [&](StateFormat format, bool on_host = false) {
      return StateBytes(lowered(dialect, format, kAll), on_host);
    };
    CHECK(bytes(StateFormat::kMaster) == 2 * 12416 * 4);
    CHECK(bytes(StateFormat::kFp32) == 2 * 12416 * 4);
    CHECK(bytes(StateFormat::kBnb8) == 2 * (12416 + 49 * 4));
    CHECK(bytes(StateFormat::kBnb8Paged, true) == 2 * (12416 + 49 * 4));
    CHECK(bytes(StateFormat::kBnb8Paged) == 0);
    CHECK(bytes(StateFormat::kBnb32Paged, true) == 2 * 12416 * 4);
    CHECK(bytes(StateFormat::kAo8) == 2 * 12416 * 4);
  }
  // The stem's 128 and four blocks of 1,024, then four blocks, then four.
  CHECK(StateBytes(lowered(Dialect::kZero3, StateFormat::kBnb8, 4096), false) ==
        2 * (4224 + 17 * 4 + 2 * (4096 + 16 * 4)));
  CHECK(StateBytes(lowered(Dialect::kZero3, StateFormat::kBnb8, 1), false) == 2 * 12416 * 4);
}

// One fetch requests b blocks ahead as long as fewer than M are gathered: from then on M blocks are
// alive while one runs, with b = 1, too, since a block's call requests as its layer's does, and one
// release takes one.
TEST_CASE("ZeRO-3: prefetch bucket and live parameters") {
  ChainSpec spec;
  spec.blocks = 14;
  const std::int64_t n = spec.width * spec.width;
  for (std::int64_t most = 1; most <= 6; ++most) {
    for (std::int64_t b = 0; b <= 4; ++b) {
      CAPTURE(most);
      CAPTURE(b);
      Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
      plan.zero.prefetch_bucket = b * n;
      plan.zero.max_live_parameters = most * n;
      plan.zero.max_reuse_distance = 0;
      const std::int64_t expected = b == 0 ? 1 : most;
      const Program p = LowerChain(spec, plan, kMixed);
      const Bytes64 alive = AliveAt(p, Block(8, "lin0.fwd"));
      CHECK(Of(alive, Category::kUnshardedParameter) == expected * n * 2);
    }
  }
}

TEST_CASE("ZeRO-3: modules of several parameters go through a flat buffer, small ones persist") {
  // Two linears per block as one unit ("leaf module"): a flat buffer and a copy out.
  ChainSpec spec;
  spec.blocks = 5;
  spec.linears = 2;
  const std::int64_t n = spec.width * spec.width;
  Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.units = Wrap(ChainModel(spec), ParseWrap("block", "test"), {}, plan.dialect, "test");
  plan.zero.prefetch_bucket = 0;
  plan.zero.max_reuse_distance = 0;
  plan.zero.persistence_threshold = spec.width * spec.stem;
  const Program p = LowerChain(spec, plan, kMixed);
  CHECK(Count(p, OpCode::kGatherCopyOut) == 2 * 5 * 2);  // parameter by parameter
  // The flat buffer goes once the copy has been issued.
  CHECK(Of(AliveAt(p, Block(2, "fwd.gather_copy_out")), Category::kAllGather) == 2 * n * 2);
  CHECK(Of(AliveAt(p, Block(2, "lin0.fwd")), Category::kAllGather) == 0);
  // The stem is persistent: gathered once per step, after the update, and there all the time.
  CHECK(Count(p, OpCode::kAllGather) == 2 * 5 + 1);
  CHECK(Of(AliveAt(p, Block(2, "lin0.fwd")), Category::kUnshardedParameter) ==
        2 * n * 2 + spec.width * spec.stem * 2);
}

// A chain of blocks of `n` elements over `w` ranks, and buckets of `k` blocks.
struct Buckets {
  ChainSpec spec;
  std::int64_t w = 0, k = 0, n = 0, stem = 0;
  Plan plan;
};

Buckets DrawBuckets(std::mt19937& random) {
  Buckets drawn;
  drawn.spec.blocks = static_cast<int>(Draw(random, 4, 9));
  drawn.spec.width = 16 * Draw(random, 1, 6);
  drawn.w = std::int64_t{1} << Draw(random, 1, 3);
  drawn.k = Draw(random, 1, 3);
  drawn.n = drawn.spec.width * drawn.spec.width;
  drawn.stem = drawn.spec.width * drawn.spec.stem;
  drawn.plan = ZeroPlan(drawn.spec, Dialect::kZero3, drawn.w);
  drawn.plan.zero.reduce_bucket = drawn.k * drawn.n;
  return drawn;
}

TEST_CASE("ZeRO-3: buckets of gradients") {
  std::mt19937 random(8);
  for (int trial = 0; trial < 30; ++trial) {
    auto [spec, w, k, n, stem, plan] = DrawBuckets(random);
    CAPTURE(trial);
    const Program p = LowerChain(spec, plan, kMixed);
    CHECK(Count(p, OpCode::kReduceScatter) == BucketCount(spec.blocks, k));
    CHECK(BytesOf(p, OpCode::kReduceScatter) == (spec.blocks * n + stem) * 4);
    // At the first one: the bucket; its cast; the padded input; this rank's part of the result.
    const std::string first = Block(spec.blocks - 1, "lin0.bwd.reduce_scatter");
    CHECK(Of(AliveAt(p, first), Category::kReduceScatter) ==
          k * n * 2 + k * n * 4 + k * n * 4 + k * n / w * 4);
    // All-fp32: no cast. Without contiguous gradients no bucket either, but the gradients.
    plan.zero.contiguous_gradients = false;
    const Bytes64 alive = AliveAt(LowerChain(spec, plan, kAllFp32), first);
    CHECK(Of(alive, Category::kReduceScatter) == k * n * 4 + k * n / w * 4);
    CHECK(Of(alive, Category::kUnshardedGradient) == (k + 1) * n * 4);
  }
}

TEST_CASE("ZeRO-3: buckets that are all-reduced") {
  std::mt19937 random(11);
  for (int trial = 0; trial < 30; ++trial) {
    auto [spec, w, k, n, stem, plan] = DrawBuckets(random);
    plan.zero.gradient_reduction = GradientReduction::kAllReduce;
    CAPTURE(trial);
    Program p = LowerChain(spec, plan, kMixed);
    const std::int64_t buckets = BucketCount(spec.blocks, k);
    CHECK(Count(p, OpCode::kReduceScatter) == 0);
    CHECK(Count(p, OpCode::kAllReduce) == buckets + 1);
    CHECK(BytesOf(p, OpCode::kAllReduce) == (spec.blocks * n + stem) * 4 + kNorm);
    // The bucket and its cast; no padded copy and no part of the result.
    const std::string first = Block(spec.blocks - 1, "lin0.bwd.all_reduce");
    CHECK(Of(AliveAt(p, first), Category::kReduceScatter) == k * n * 2 + k * n * 4);
    // Before 0.6 all of the bucket each time.
    plan.zero.before_deepspeed_0_6 = true;
    p = LowerChain(spec, plan, kMixed);
    CHECK(Count(p, OpCode::kAllReduce) == buckets + 1);
    CHECK(BytesOf(p, OpCode::kAllReduce) == buckets * k * n * 4 + kNorm);
    // A bucket too small for a block: then the blocks go beside it, and it goes beside them.
    plan.zero.reduce_bucket = stem;
    p = LowerChain(spec, plan, kAllFp32);
    CHECK(Count(p, OpCode::kAllReduce) == 2 * spec.blocks + 1 + 1);
    CHECK(BytesOf(p, OpCode::kAllReduce) == (spec.blocks * (n + stem) + stem) * 4 + kNorm);
    // Where a block's gradient is made, the one before waits for its reduction; what was reduced
    // last is still there, and since 0.6 it is not.
    const std::string third = Block(spec.blocks - 3, "lin0.bwd");
    CHECK(Of(AliveAt(p, third), Category::kUnshardedGradient) == 3 * n * 4);
    plan.zero.before_deepspeed_0_6 = false;
    p = LowerChain(spec, plan, kAllFp32);
    CHECK(Of(AliveAt(p, third), Category::kUnshardedGradient) == 2 * n * 4);
    // Since 0.6 what is not in the bucket is scattered: each block, and the stem if it is alone.
    CHECK(Count(p, OpCode::kReduceScatter) == spec.blocks);
    CHECK(Count(p, OpCode::kAllReduce) == 1 + 1);
    plan.zero.contiguous_gradients = false;
    p = LowerChain(spec, plan, kAllFp32);
    CHECK(Count(p, OpCode::kReduceScatter) == spec.blocks + 1);
    CHECK(Count(p, OpCode::kAllReduce) == 1);
  }
}

// DeepSpeed 0.19.8: one gather per parameter (_allgather_params_coalesced).
TEST_CASE("ZeRO-3: persistent modules come back one by one") {
  ChainSpec spec;
  spec.blocks = 5;
  Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.zero.prefetch_bucket = plan.zero.max_reuse_distance = 0;
  plan.zero.persistence_threshold = spec.width * spec.width;
  const auto gathers = [&](Phase phase) {
    const Program p = LowerChain(spec, plan, kMixed);
    return std::count_if(p.step.ops.begin(), p.step.ops.end(), [&](const Op& op) {
      return op.phase == phase && p.ShapeOf(op).code == OpCode::kAllGather;
    });
  };
  CHECK(gathers(Phase::kOptimizer) == spec.blocks + 1);  // and the stem
  plan.zero.before_deepspeed_0_6 = true;
  CHECK(gathers(Phase::kOptimizer) == 1);
}

TEST_CASE("ZeRO-3 before 0.6: what lives while it is needed") {
  ChainSpec spec;
  spec.blocks = 4;
  spec.width = 64;
  const std::int64_t n = spec.width * spec.width, all = 4 * n + spec.width * spec.stem;
  Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.zero.prefetch_bucket = plan.zero.max_reuse_distance = 0;
  plan.zero.before_deepspeed_0_6 = true;
  plan.accumulation = 2;
  for (const Overlap overlap : {Overlap::kOff, Overlap::kOn}) {
    plan.zero.overlap_comm = overlap;
    const Program p = LowerChain(spec, plan, kMixed, [](Job& job) { job.clip_gradients = true; });
    // The host is done with the device before it requests.
    const auto code = [&](std::uint32_t i) { return p.ShapeOf(p.step.ops[i]).code; };
    for (std::uint32_t i = 1; i < p.step.size(); ++i) {
      CHECK((code(i) != OpCode::kGatherCopyIn || code(i - 1) == OpCode::kHostWait));
    }
    // A gather has the weights and NCCL's copy of them, in a pool that the compute stream has not.
    const Bytes64 gather = AliveAt(p, Block(2, "lin0.fwd.all_gather"));
    CHECK(Of(gather, Category::kUnshardedParameter) == n * 2);
    CHECK(Of(gather, Category::kAllGather) == n * 2);
    for (const Buffer& b : p.buffers) {
      const bool gathered =
          b.category == Category::kUnshardedParameter || b.category == Category::kAllGather;
      CHECK((b.owner == Stream::kGather) == gathered);
    }
    // The bucket is there in backward, the partitions from the first reduction on until the update
    // has cast them.
    const Bytes64 forward = AliveAt(p, Block(2, "lin0.fwd"));
    CHECK(Of(forward, Category::kReduceScatter) == 0);
    CHECK(Of(forward, Category::kShardedGradient) == 0);
    const Bytes64 last = AliveAt(p, Block(3, "lin0.bwd"));
    CHECK(Of(last, Category::kReduceScatter) == n * 2);
    CHECK(Of(last, Category::kShardedGradient) == 0);
    CHECK(Of(AliveAt(p, Block(0, "lin0.bwd")), Category::kShardedGradient) == all / 4 * 2);
    const Bytes64 second = AliveAt(p, "mb1.block2.lin0.fwd");
    CHECK(Of(second, Category::kReduceScatter) == 0);
    CHECK(Of(second, Category::kShardedGradient) == all / 4 * 2);
    const Bytes64 norm = AliveAt(p, "opt.grad_norm");
    CHECK(Of(norm, Category::kReduceScatter) == 0);
    CHECK(Of(norm, Category::kShardedGradient) == all / 4 * 2);
    CHECK(Of(AliveAt(p, "stem.opt.optimizer_step"), Category::kShardedGradient) == all / 4 * 4);
  }
}

// Bytes per element of a rank's partitions: p = 2, o = 4, AdamW's states 8.
TEST_CASE("ZeRO-3: what the host holds and what travels") {
  ChainSpec spec;
  spec.blocks = 6;
  const std::int64_t n = spec.width * spec.width, all = 6 * n + spec.width * spec.stem, w = 4;
  Plan plan = ZeroPlan(spec, Dialect::kZero3, w);
  plan.zero.max_reuse_distance = plan.zero.prefetch_bucket = 0;
  for (const bool parameters : {false, true}) {
    CAPTURE(parameters);
    plan.offload = {.parameters = parameters, .optimizer = !parameters};
    const Program p = LowerChain(spec, plan, kMixed);
    // Gradients leave as fp32. Weights come back once, or with every gather: stem and blocks, and
    // in backward all of them again.
    CHECK(BytesOf(p, OpCode::kCopyD2h) == all / w * 4);
    std::int64_t weights = 0;
    for (const Op& op : p.step.ops) {
      const bool is_weight = p.ShapeOf(op).code == OpCode::kCopyH2d && op.subject != kNoSubject;
      weights += is_weight ? p.ShapeOf(op).bytes.value : 0;
    }
    CHECK(weights == (parameters ? 2 : 1) * all / w * 2);
    CHECK(Count(p, OpCode::kOptimizerStep) == 0);
    CHECK(Count(p, OpCode::kHostOptimizerStep) == 1);
    const Bytes64 update = AliveAt(p, "opt.host_optimizer_step");
    CHECK(Of(update, Category::kParameterShard) == (parameters ? 0 : all / w * 2));
    CHECK(Of(update, Category::kOptimizerState) == 0);
    CHECK(Of(update, Category::kShardedGradient) == 0);
    std::int64_t host = 0;
    for (const Buffer& b : p.buffers) {
      const bool is_resident =
          b.category == Category::kParameterShard || b.category == Category::kOptimizerState;
      host += b.on_host && is_resident ? b.size.value : 0;
    }
    CHECK(host == all / w * (2 + 4 + 8));
  }
}

// As DeepSpeed's partition_grads with grad_partitions_flat_buffer on the host.
TEST_CASE("ZeRO-3: gradients wait on the host for the next micro-batch") {
  ChainSpec spec;
  spec.blocks = 6;
  const std::int64_t n = spec.width * spec.width, all = 6 * n + spec.width * spec.stem, w = 4;
  Plan plan = ZeroPlan(spec, Dialect::kZero3, w);
  plan.offload.optimizer = true;
  plan.accumulation = 3;
  const Program p = LowerChain(spec, plan, kMixed);
  // Two sums in p and the whole in o leave; the sums come back, and the new weights.
  CHECK(BytesOf(p, OpCode::kCopyD2h) == all / w * (2 + 2 + 4));
  CHECK(BytesOf(p, OpCode::kCopyH2d) >= all / w * (2 + 2 + 2));
  // No partition stays on the device from one micro-batch to the next.
  CHECK(Of(AliveAt(p, "mb1.stem.fwd"), Category::kShardedGradient) == 0);
}

TEST_CASE("ZeRO-3: gradients go to the host without those that nothing makes") {
  ChainSpec spec;
  spec.blocks = 2;
  Model model = ChainModel(spec);
  Parameter spare;
  spare.fqn = "spare";
  spare.shape = {8, 8};
  spare.module = ModuleId(0);
  model.modules[0].params.emplace_back(static_cast<std::uint32_t>(model.params.size()));
  model.params.push_back(spare);
  Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.units.resize(1);
  plan.units.front().name = "root";
  plan.units.front().modules = {""};
  plan.offload.optimizer = true;
  const KernelSetOptions kernels = FindKernelSet("torch-eager", "test");
  const Program p = Lower({model, kernels, ChainJob(spec, kMixed), plan});
  CHECK(Verify(p).empty());
  CHECK(Count(p, OpCode::kCopyD2h) == 3);
  CHECK(Count(p, OpCode::kHostOptimizerStep) == 1);
}

TEST_CASE("ZeRO-3: sub-groups bound what the update needs") {
  ChainSpec spec;
  spec.blocks = 6;
  const std::int64_t n = spec.width * spec.width, stem = spec.width * spec.stem;
  Plan plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.zero.sub_group = 2 * n / 4;
  // Stem and two blocks, then twice two blocks: n * 6 + stem.
  const Program p = LowerChain(spec, plan, kMixed);
  CHECK(Count(p, OpCode::kOptimizerStep) == 3);
  const std::int64_t kept = (6 * n + stem) / 4 * 2;
  CHECK(Of(AliveAt(p, "stem.opt.optimizer_step"), Category::kShardedGradient) ==
        kept + (2 * n + stem) / 4 * 4);
  CHECK(Of(AliveAt(p, "block2.lin0.opt.optimizer_step"), Category::kShardedGradient) ==
        kept + 2 * n / 4 * 4);
}

// Two linear layers one behind the other with one weight of 8 x 8 and a bias of 8 each.
Model SharedWeightBesideBiases() {
  Model model;
  model.name = "shared";
  model.type = "custom";
  model.sequence_length = model.tokens_per_sample = 1;
  OpSpec linear;
  linear.kind = OpKind::kLinear;
  linear.rows = 1;
  linear.in = linear.out = 8;
  linear.has_bias = true;
  model.specs = {linear};
  model.tensors.push_back({TensorRole::kActivation, 8, true, ModelOpId()});
  const ModuleId root = AddModule(model, {}, "", "Net");
  ParamId weight;
  for (const char* name : {"a", "b"}) {
    ModelOp op;
    op.module = AddModule(model, root, name, "Linear");
    op.name = name;
    op.params = {AddParam(model, op.module, "weight", {8, 8}, weight),
                 AddParam(model, op.module, "bias", {8})};
    weight = ParamId(0);
    op.inputs = {TensorId(model.tensors.size() - 1)};
    op.outputs = {TensorId(model.tensors.size())};
    model.tensors.push_back({TensorRole::kActivation, 8, true, ModelOpId(model.ops.size())});
    model.ops.push_back(op);
  }
  ValidateModel(model, "test");
  return model;
}

// DeepSpeed gathers what the module at hand has and is not there (__all_gather_params): 64 + 8
// elements for each of the four calls, of which the second in forward finds the weight kept for it
// where the reuse distance is not 0, as does the first in backward. All 64 + 8 + 8 are reduced.
TEST_CASE("ZeRO-3: modules that share a weight gather their own biases") {
  const Model model = SharedWeightBesideBiases();
  Plan plan;
  plan.dialect = Dialect::kZero3;
  plan.shard_size = 2;
  plan.units = Wrap(model, ParseWrap("module", "test"), {}, plan.dialect, "test");
  plan.zero.reduce_bucket = 1000;
  plan.zero.persistence_threshold = plan.zero.prefetch_bucket = 0;
  const auto gathered = [&](std::int64_t reuse) {
    plan.zero.max_reuse_distance = reuse;
    const Program p =
        Lower({model, FindKernelSet("torch-eager", "test"), ChainJob(ChainSpec{}, kAllFp32), plan});
    CHECK(Verify(p).empty());
    CHECK(BytesOf(p, OpCode::kReduceScatter) == (64 + 8 + 8) * 4);
    std::vector<std::int64_t> elements;
    for (const Op& op : p.step.ops) {
      if (p.ShapeOf(op).code == OpCode::kAllGather) {
        elements.push_back(p.ShapeOf(op).bytes.value / 4);
      }
    }
    return elements;
  };
  CHECK(gathered(0) == std::vector<std::int64_t>{72, 72, 72, 72});
  // One element of reuse: the next call alone. Of a that is b's, which has the weight; of b in
  // forward its own in backward; of that one a's.
  CHECK(gathered(1) == std::vector<std::int64_t>{72, 8, 8});
}

TEST_CASE("FetchOrder: a pass that skips a later use keeps the unit") {
  // Calls A B A: the fetch at the first A passes over the second one, since A is there; so A is not
  // released in between although the reuse distance is 0. Sizes are 10.
  ZeroOptions options;
  options.prefetch_bucket = 100;
  options.max_reuse_distance = 0;
  FetchOrder order(options, 2);
  const UnitId a(0), b(1);
  std::vector<bool> here(2, false);
  const auto away = [&](UnitId u) { return here[u.value] ? 0 : 10; };
  const auto size = [](UnitId) { return 10; };
  order.BeginPass();
  for (const UnitId u : {a, b, a}) {
    CHECK(order.Fetch({u}, away).empty());
  }
  order.EndPass();
  order.BeginPass();
  here[0] = true;
  CHECK(order.Fetch({a}, away) == std::vector<UnitId>{b});
  here[1] = true;
  CHECK(order.IsUsedSoon(a, size));
  CHECK(order.Fetch({b}, away).empty());
  CHECK_FALSE(order.IsUsedSoon(b, size));
  CHECK(order.Fetch({a}, away).empty());
  CHECK_FALSE(order.IsUsedSoon(a, size));
}

// A model that is called twice before backward: the first forward is recorded, the second follows
// it, and backward, which it does not have, makes the next pass record anew.
TEST_CASE("FetchOrder: a backward that no trace has forgets it") {
  ZeroOptions options;
  options.prefetch_bucket = 100;
  options.max_reuse_distance = 100;
  FetchOrder order(options, 2);
  const UnitId a(0), b(1);
  const auto away = [](UnitId) { return 10; };
  const auto size = [](UnitId) { return 10; };
  for (int step = 0; step < 2; ++step) {
    order.BeginPass();
    CHECK(order.Fetch({a}, away).empty());
    CHECK_FALSE(order.IsComplete());
    CHECK(order.Fetch({b}, away).empty());
    order.EndPass();
    order.BeginPass();
    CHECK(order.IsComplete());
    CHECK(order.Fetch({a}, away) == std::vector<UnitId>{b});
    CHECK(order.IsUsedSoon(b, size));
    CHECK(order.Fetch({b}, away).empty());
    CHECK(order.Fetch({b}, away).empty());  // backward
    CHECK_FALSE(order.IsComplete());
    CHECK_FALSE(order.IsUsedSoon(a, size));
    CHECK(order.Fetch({a}, away).empty());
    order.EndPass();
  }
}

TEST_CASE("ZeRO plans: what the stages leave no choice about") {
  ChainSpec spec;
  const Model model = ChainModel(spec);
  const auto error = [&](const Plan& plan) {
    try {
      ValidatePlan(model, ChainJob(spec, kMixed), plan, "p.json: plan");
    } catch (const InputError& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  Plan plan = ZeroPlan(spec, Dialect::kZero2, 4);
  CHECK(error(plan) == "");
  plan.sync = SyncMode::kLast;
  CHECK(error(plan) ==
        "p.json: plan.sync: got \"last\", expected \"every\"; dialect zero2 has no such choice: "
        "zero1 reduces on the last micro-batch, zero2 and zero3 on each");
  plan = ZeroPlan(spec, Dialect::kZero2, 4);
  plan.zero.prefetch_bucket = 7;
  CHECK(error(plan) ==
        "p.json: plan.zero.prefetch_bucket: got an option of dialect zero3 in a plan of dialect "
        "zero2, expected its default");
  plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.units.back().reshard.kind = Reshard::Kind::kNever;
  CHECK(error(plan) ==
        "p.json: plan.units[5].reshard: got \"never\", expected \"always\"; dialect zero3 has no "
        "such choice: its stage decides what stays gathered");
  plan = ZeroPlan(spec, Dialect::kZero3, 4);
  plan.zero.reduce_bucket = 0;
  CHECK(error(plan) ==
        "p.json: plan.zero.reduce_bucket: got 0, expected an integer in [1, 281474976710656]");
  plan = ChainPlan(spec, Dialect::kFsdp1, 4);
  plan.zero.reduce_bucket = 1;
  CHECK(error(plan) ==
        "p.json: plan.zero.reduce_bucket: got an option of dialects zero1, zero2 and zero3 in a "
        "plan of dialect fsdp1, expected its default");
}

}  // namespace
}  // namespace shardwright
