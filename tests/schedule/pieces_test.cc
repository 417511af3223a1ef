// Buffers that stand for several allocations of a framework.

#include <algorithm>
#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/builder.h"
#include "schedule/lower.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"

namespace shardwright {
namespace {

std::vector<std::int64_t> PieceSizes(const Program& program, const Buffer& buffer) {
  std::vector<std::int64_t> sizes;
  for (const Bytes piece : program.PiecesOf(buffer)) {
    sizes.push_back(piece.value);
  }
  return sizes;
}

TEST_CASE("equal lists of pieces are stored once, lists of one piece not at all") {
  Program program;
  PieceInterner interner(program);
  const std::vector<Bytes> one = {Bytes(512)};
  const std::vector<Bytes> two = {Bytes(512), Bytes(7)};
  const std::vector<Bytes> three = {Bytes(512), Bytes(7), Bytes(0)};
  CHECK(interner.Intern(one) == PieceRange{0, 0});
  CHECK(interner.Intern(two) == PieceRange{0, 2});
  CHECK(interner.Intern(three) == PieceRange{2, 3});
  CHECK(interner.Intern(two) == PieceRange{0, 2});
  CHECK(program.pieces.size() == 5);
}

// The first buffer of a category that init or the step allocates.
const Buffer& FirstOf(const Program& program, const Body& body, Category category) {
  for (const MemoryPoint& point : body.points) {
    const Buffer& buffer = program.buffers[point.buffer.value];
    if (point.kind != PointKind::kFree && buffer.category == category) {
      return buffer;
    }
  }
  FAIL("no such buffer");
  return program.buffers.front();
}

// One block of three layers of 64 x 64 weights on two ranks: 4096 elements each, 12288 in all.
Program LowerBlock(Dialect dialect, bool use_orig_params = true) {
  const Model model = testing::ChainModel({.blocks = 1, .linears = 3});
  Job job;
  job.sequence_length = model.sequence_length;
  Plan plan;
  plan.dialect = dialect;
  plan.shard_size = 2;
  plan.use_orig_params = use_orig_params;
  UnitPlan block;
  block.name = "block0";
  block.modules = {"block0"};
  UnitPlan root;
  root.name = "root";
  root.modules = {""};
  if (dialect != Dialect::kZero3) {
    root.reshard.kind = Reshard::Kind::kNever;
  }
  plan.units = {block, root};
  return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
}

using Sizes = std::vector<std::int64_t>;

TEST_CASE("FSDP2 keeps one tensor per parameter") {
  const Program program = LowerBlock(Dialect::kFsdp2);
  // fp32 shards of half the rows; bf16 unsharded.
  const Sizes shards(3, 4096 / 2 * 4);
  CHECK(PieceSizes(program, FirstOf(program, program.init, Category::kParameterShard)) == shards);
  CHECK(PieceSizes(program, FirstOf(program, program.step, Category::kOptimizerState)) == shards);
  // The root's stem comes first in forward: a single weight, so no pieces.
  CHECK(FirstOf(program, program.step, Category::kUnshardedParameter).pieces.count == 0);
  const auto is_block = [](const Buffer& b) {
    return b.category == Category::kUnshardedParameter && b.size == Bytes(12288 * 2);
  };
  const auto found = std::find_if(program.buffers.begin(), program.buffers.end(), is_block);
  REQUIRE(found != program.buffers.end());
  CHECK(PieceSizes(program, *found) == Sizes(3, 4096 * 2));
  CHECK(Verify(program).empty());
}

TEST_CASE("FSDP1 cuts the states of a flat shard at the borders of parameters") {
  // The first rank's half, 6144 elements, ends in the middle of the second weight.
  const Program views = LowerBlock(Dialect::kFsdp1);
  CHECK(FirstOf(views, views.init, Category::kParameterShard).pieces.count == 0);
  CHECK(PieceSizes(views, FirstOf(views, views.step, Category::kOptimizerState)) ==
        Sizes{4096 * 4, 2048 * 4});
  const Program flat = LowerBlock(Dialect::kFsdp1, false);
  CHECK(FirstOf(flat, flat.step, Category::kOptimizerState).pieces.count == 0);
}

TEST_CASE("temporaries of a multi-tensor update: one tensor per parameter") {
  const Program program = LowerBlock(Dialect::kFsdp2);
  // AdamW's square root of v: three shards of the block, then the stem's of 64 / 2 rows of 8.
  const std::int64_t shard = 4096 / 2 * 4;
  const auto is_temporary = [&](const Buffer& b) {
    return b.category == Category::kTemporary && b.size == Bytes(3 * shard + 64 / 2 * 8 * 4);
  };
  const auto found = std::find_if(program.buffers.begin(), program.buffers.end(), is_temporary);
  REQUIRE(found != program.buffers.end());
  CHECK(PieceSizes(program, *found) == Sizes{shard, shard, shard, 1024});
}

TEST_CASE("ZeRO-3: a flat tensor per kind and sub-group") {
  const Program program = LowerBlock(Dialect::kZero3);
  // Weights, masters, gradients, two states; then the masters' gradients of two bodies.
  std::vector<std::int64_t> sizes(8);
  for (const Buffer& buffer : program.buffers) {
    REQUIRE(buffer.flat < sizes.size());
    sizes[buffer.flat] += buffer.size.value;
  }
  const std::int64_t all = 3 * 4096 / 2 + 64 / 2 * 8;  // elements of a rank, as above
  CHECK(Sizes(sizes.begin() + 1, sizes.end()) ==
        Sizes{all * 2, all * 4, all * 2, all * 4, all * 4, all * 4, all * 4});
}

TEST_CASE("ZeRO-3 runs its hooks around the ops of the model, FSDP2 does not") {
  for (const Dialect dialect : {Dialect::kZero3, Dialect::kFsdp2}) {
    const Program program = LowerBlock(dialect);
    std::size_t in_hooks = 0;
    std::size_t of_model = 0;
    for (const Op& op : program.step.ops) {
      if (op.phase == Phase::kForward && program.ShapeOf(op).code == OpCode::kCompute) {
        ++of_model;
        in_hooks += program.ShapeOf(op).issue == Issue::kHook ? 1U : 0U;
      }
    }
    REQUIRE(of_model > 0);
    CHECK(in_hooks == (dialect == Dialect::kZero3 ? of_model : 0));
  }
}

TEST_CASE("Verify wants slices of a flat tensor to be alike") {
  Program program = LowerBlock(Dialect::kZero3);
  const auto first = std::find_if(program.buffers.begin(), program.buffers.end(),
                                  [](const Buffer& b) { return b.flat == 2; });
  const auto second =
      std::find_if(first + 1, program.buffers.end(), [](const Buffer& b) { return b.flat == 2; });
  REQUIRE(second != program.buffers.end());
  second->owner = Stream::kReduce;
  const auto findings = Verify(program);
  REQUIRE(!findings.empty());
  CHECK(findings.front().text ==
        "buffer " + std::to_string(second - program.buffers.begin()) +
            " lies in a flat tensor with pieces, on the host or with another owner");
}

TEST_CASE("Verify wants pieces that add up") {
  Program program = LowerBlock(Dialect::kFsdp2);
  program.pieces.front() -= Bytes(1);  // buffer 0 is the host copy of the inputs
  const auto findings = Verify(program);
  REQUIRE(!findings.empty());
  CHECK(findings.front().text ==
        "buffer 1 has pieces out of range, of negative size, or of a smaller sum");
}

}  // namespace
}  // namespace shardwright
