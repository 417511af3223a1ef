// Rule 10 of docs/execution_model.md section 3: what updates read are means over all ranks and
// micro-batches. A factor that is missing, wrong or there twice is found in every dialect.

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/plan_names.h"
#include "schedule/program.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"
#include "tests/schedule/random_plan.h"

namespace shardwright {
namespace {

using testing::ChainJob;
using testing::ChainModel;
using testing::ChainPlan;
using testing::ChainSpec;
using testing::DrawCase;
using testing::LowerCase;
using testing::RandomCase;

// Shapes of ops that some body has.
std::set<std::size_t> UsedShapes(const Program& program) {
  std::set<std::size_t> used;
  for (const Body* body : {&program.init, &program.warmup, &program.step}) {
    for (const Op& op : body->ops) {
      used.insert(op.shape.value);
    }
  }
  return used;
}

// Rule 10 and no other.
bool IsOfMeans(const Program& program) {
  const std::vector<Finding> findings = Verify(program);
  for (const Finding& finding : findings) {
    CAPTURE(finding.text);
    CHECK(finding.rule == 10);
    CHECK(!finding.buffer.empty());
  }
  return !findings.empty();
}

TEST_CASE("Verify finds a factor that is missing, wrong or there twice, in every dialect") {
  std::mt19937 random(20261126);
  std::map<std::string, int> mutants;
  for (int trial = 0; trial < 150; ++trial) {
    const RandomCase c = DrawCase(random);
    // Before 0.6 a bucket is reduced also when it is empty: that factor divides nothing.
    if (c.plan.zero.before_deepspeed_0_6) {
      continue;
    }
    CAPTURE(c.description);
    Program program = LowerCase(c);
    CHECK(!IsOfMeans(program));
    for (const std::size_t s : UsedShapes(program)) {
      OpShape& shape = program.shapes[s];
      const double right = shape.divisor;
      if (right == 1.0) {
        continue;
      }
      CAPTURE(InfoOf(shape.code).name);
      for (const double wrong : {1.0, right * right, 1.5 * right}) {
        CAPTURE(wrong);
        shape.divisor = wrong;
        CHECK(IsOfMeans(program));
        ++mutants[program.dialect];
      }
      shape.divisor = right;
    }
  }
  for (const std::string_view dialect : kDialectNames) {
    CAPTURE(dialect);
    CHECK(mutants[std::string(dialect)] >= 10);
  }
}

// Two shards, two micro-batches, one linear layer besides the stem.
Program SmallProgram(std::int64_t replicas = 1) {
  const ChainSpec spec{.blocks = 1, .linears = 1, .width = 6, .stem = 4};
  Plan plan = ChainPlan(spec, Dialect::kFsdp2, 2);
  plan.replicate_size = replicas;
  plan.accumulation = 2;
  const Model model = ChainModel(spec);
  const Job job = ChainJob(spec, {DType::kFp32, DType::kFp32, DType::kFp32});
  return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
}

std::string FirstFinding(const Program& program) {
  const std::vector<Finding> findings = Verify(program);
  return findings.empty() ? "" : findings.front().text;
}

OpShape& ShapeOf(Program& program, OpCode code) {
  for (const Op& op : program.step.ops) {
    if (program.ShapeOf(op).code == code) {
      return program.shapes[op.shape.value];
    }
  }
  FAIL("no such op");
  return program.shapes.front();
}

TEST_CASE("Verify says what is wrong with a gradient") {
  const std::string kUpdate =
      "step 1: opt.optimizer_step, sharded_gradient@mb0.block0.bwd.reduce_scatter: uses gradients "
      "that ";
  Program program = SmallProgram();
  CHECK(FirstFinding(program).empty());
  ShapeOf(program, OpCode::kReduceScatter).divisor = 1.0;
  CHECK(FirstFinding(program) == kUpdate + "are 2 times their mean");
  program = SmallProgram();
  ShapeOf(program, OpCode::kOptimizerStep).divisor = 4.0;
  CHECK(FirstFinding(program) == kUpdate + "are 0.5 times their mean");
  program = SmallProgram();
  program.replicate_size = 2;  // and nobody sums over the replicas
  CHECK(FirstFinding(program) == kUpdate + "are summed over 2 of 4 ranks");
  program = SmallProgram();
  for (Op& op : program.step.ops) {  // both micro-batches' gradients are called those of the first
    op.micro_batch = 0;
  }
  CHECK(FirstFinding(program) == kUpdate + "lack those of micro-batch 1");
  program = SmallProgram();
  for (Op& op : program.step.ops) {
    op.micro_batch = 1;
  }
  CHECK(FirstFinding(program).ends_with(": uses gradients that lack those of micro-batch 0"));
  program = SmallProgram();
  program.groups[0].size = program.shard_size = 4;  // and the sum is still divided by two
  CHECK(FirstFinding(program) == kUpdate + "are 2 times their mean");
  program = SmallProgram(2);
  CHECK(FirstFinding(program).empty());
  program.groups[1] = {"replicate", 4, 1};  // over all ranks, of which two are summed already
  CHECK(FirstFinding(program) ==
        "step 1: mb0.block0.bwd.all_reduce, sharded_gradient@mb0.block0.bwd.reduce_scatter: sums "
        "over group replicate gradients that are summed over a part of it already");
}

// ZeRO-1 reduces a gradient larger than a bucket in parts: here a weight of 12 x 12
// over four ranks, 20 elements a bucket.
TEST_CASE("Verify: parts of a gradient are reduced in any order, and each once") {
  const ChainSpec spec{.blocks = 1, .linears = 1, .width = 12, .stem = 4};
  Plan plan = ChainPlan(spec, Dialect::kZero1, 4);
  plan.zero.reduce_bucket = 20;
  for (UnitPlan& unit : plan.units) {
    unit.reshard = {};
  }
  const Model model = ChainModel(spec);
  const Job job = ChainJob(spec, {DType::kFp32, DType::kBf16, DType::kBf16});
  const Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  std::vector<std::size_t> parts;  // of 36 elements each, in bf16
  for (std::size_t i = 0; i < program.step.size(); ++i) {
    const OpShape& shape = program.ShapeOf(program.step.ops[i]);
    if (shape.code == OpCode::kAllReduce && shape.bytes == Bytes(72)) {
      parts.push_back(i);
    }
  }
  REQUIRE(parts.size() == 4);
  CHECK(FirstFinding(program).empty());
  const auto access_of = [&](Program& changed, std::size_t part) -> Access& {
    return changed.step.accesses[changed.step.ops[parts[part]].access_begin];
  };
  Program swapped = program;
  std::swap(swapped.step.ops[parts[0]].shape, swapped.step.ops[parts[1]].shape);
  std::swap(access_of(swapped, 0), access_of(swapped, 1));
  CHECK(FirstFinding(swapped).empty());
  for (std::size_t part = 0; part < parts.size(); ++part) {
    CAPTURE(part);
    Program doubled = program;  // in the place of another one
    const std::size_t other = part == 0 ? 1 : 0;
    doubled.step.ops[parts[other]].shape = doubled.step.ops[parts[part]].shape;
    access_of(doubled, other) = access_of(doubled, part);
    CHECK(IsOfMeans(doubled));
    Program shorter = program;
    OpShape shape = shorter.ShapeOf(shorter.step.ops[parts[part]]);
    shape.bytes -= Bytes(2);
    shorter.shapes.push_back(shape);
    shorter.step.ops[parts[part]].shape = ShapeId(shorter.shapes.size() - 1);
    CHECK(IsOfMeans(shorter));
    CHECK(FirstFinding(shorter).ends_with("is read where 286 of 288 bytes are summed"));
    Program dropped = program;
    OpShape nothing;
    nothing.code = OpCode::kStreamWait;
    nothing.stream = shape.stream;
    dropped.shapes.push_back(nothing);
    dropped.step.ops[parts[part]].shape = ShapeId(dropped.shapes.size() - 1);
    CHECK(FirstFinding(dropped).ends_with("is read where 216 of 288 bytes are summed"));
  }
}

}  // namespace
}  // namespace shardwright
