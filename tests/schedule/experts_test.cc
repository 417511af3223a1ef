// Experts that ranks share out, under FSDP2. Their order and sizes are compared with PyTorch's by
// torch_experts.py; here are the groups, the bytes by closed form, and planted faults.

#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/cut_experts.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using testing::Count;

struct Mixture {
  Model model;
  Job job;
  Plan plan;

  [[nodiscard]] Program Lowered() const {
    return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  }
};

// Mixtral 8x7B, 32 layers, on `shard` x `replicate` ranks of which `experts` share out the experts.
Mixture Of(std::int64_t shard, std::int64_t replicate, std::int64_t experts) {
  Mixture m;
  LoadOptions options;
  options.sequence_length = m.job.sequence_length = 64;
  m.model = LoadModel("mixtral-8x7b", options);
  CutExperts(m.model, experts, "test");
  m.plan.shard_size = shard;
  m.plan.replicate_size = replicate;
  m.plan.expert_size = experts;
  m.plan.units = Wrap(m.model, ParseWrap("block", "test"), {}, Dialect::kFsdp2, "test");
  AddExpertUnits(m.model, m.plan.units);
  return m;
}

TEST_CASE("shared-out experts: units, groups and collectives") {
  const Mixture m = Of(4, 2, 2);
  CHECK(m.plan.units.size() == 65);
  CHECK(m.plan.units[0].name == "model.layers.0.block_sparse_moe.experts");
  CHECK(m.plan.units[1].forward_prefetch ==
        std::vector<std::string>{"model.layers.1", "model.layers.1.block_sparse_moe.experts"});
  const Program program = m.Lowered();
  for (const Finding& finding : Verify(program)) {
    FAIL_CHECK(finding.text);
  }
  std::vector<Group> groups = program.groups;
  CHECK(std::find(groups.begin(), groups.end(), Group{"ep", 2, 1}) != groups.end());
  CHECK(std::find(groups.begin(), groups.end(), Group{"efsdp", 2, 2}) != groups.end());
  // Numbers, rows out and back in forward; rows twice in backward.
  CHECK(Count(program, OpCode::kAllToAll, "ep") == 32 * 5);
  CHECK(Count(program, OpCode::kHostWait) >= 32);
  CHECK(Count(program, OpCode::kReduceScatter, "efsdp") == 32);
  CHECK(Count(program, OpCode::kReduceScatter, "shard") == 33);
  // Masters: a quarter of what is not experts', and of each expert what two ranks with the same
  // ones have. Matrices of 4096 x 14336, three for each of 8 experts in 32 layers.
  constexpr std::int64_t kExperts = std::int64_t{32} * 8 * 3 * 4096 * 14336;
  std::int64_t masters = 0;
  for (const Buffer& buffer : program.buffers) {
    masters += buffer.category == Category::kParameterShard ? buffer.size.value : 0;
  }
  CHECK(masters == 4 * (CountParameters(m.model) - kExperts) / 4 + 4 * kExperts / 2 / 2);
}

TEST_CASE("shared-out experts: nothing is gathered where every rank has its own") {
  const Program program = Of(4, 1, 4).Lowered();
  CHECK(Verify(program).empty());
  CHECK(Count(program, OpCode::kAllGather, "efsdp") == 0);
  CHECK(Count(program, OpCode::kReduceScatter, "efsdp") == 0);
}

TEST_CASE("shared-out experts: Verify finds means over the wrong number of ranks") {
  for (const std::int64_t experts : {2, 4}) {
    Program program = Of(4, 2, experts).Lowered();
    REQUIRE(Verify(program).empty());
    int planted = 0;
    for (std::size_t s = 0; s < program.shapes.size(); ++s) {
      OpShape& shape = program.shapes[s];
      const bool is_of_experts = shape.divisor == 8 && (shape.code == OpCode::kReduceScatter ||
                                                        shape.code == OpCode::kGradStore);
      if (is_of_experts) {
        shape.divisor = 2;  // as if rows of these ranks alone had come
        ++planted;
      }
    }
    REQUIRE(planted > 0);
    const std::vector<Finding> findings = Verify(program);
    REQUIRE(!findings.empty());
    CHECK(findings.front().rule == 10);
    // The rows of ranks that share them out are forgotten.
    program = Of(4, 2, experts).Lowered();
    program.expert_ops.clear();
    CHECK(!Verify(program).empty());
  }
}

TEST_CASE("shared-out experts: plans that cannot be are refused") {
  const auto refusal = [](const Mixture& m) {
    try {
      (void)m.Lowered();
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  Mixture m = Of(4, 1, 2);
  m.plan.dialect = Dialect::kNative;
  CHECK(refusal(m).find("dialect fsdp2 alone") != std::string::npos);
  m = Of(4, 1, 2);
  m.plan.offload.parameters = true;
  CHECK(refusal(m).find("without offloaded parameters") != std::string::npos);
  m = Of(6, 1, 4);
  CHECK(refusal(m).find("a divisor of shard_size 6") != std::string::npos);
  m = Of(4, 1, 2);
  m.plan.expert_size = 1;
  CHECK(refusal(m).find("one of so many parts of its experts") != std::string::npos);
  m = Of(4, 1, 2);
  m.plan.units = Wrap(m.model, ParseWrap("block", "test"), {}, Dialect::kFsdp2, "test");
  CHECK(refusal(m).find("a unit of their own") != std::string::npos);
}

}  // namespace
}  // namespace shardwright
