// Tokens that ranks cut, under FSDP2. Their order and sizes are compared with PyTorch's by
// torch_context.py; here are the groups, the collectives by closed form, and planted faults.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/cut_context.h"
#include "models/cut_experts.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

struct Cut {
  Model model;
  Job job;
  Plan plan;

  [[nodiscard]] Program Lowered() const {
    return Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  }
};

Cut Of(const char* model, std::int64_t shard, std::int64_t replicate, std::int64_t context,
       std::int64_t experts = 1, ContextMethod method = ContextMethod::kGather) {
  Cut c;
  LoadOptions options;
  options.sequence_length = c.job.sequence_length = 256;
  c.job.precision = testing::kMixed;
  c.model = LoadModel(model, options);
  CutExperts(c.model, experts, "test");
  CutContext(c.model, context, method, "test");
  c.plan.shard_size = shard;
  c.plan.replicate_size = replicate;
  c.plan.expert_size = experts;
  c.plan.context_size = context;
  c.plan.context_method = method;
  c.plan.micro_batch = 2;
  c.plan.units = Wrap(c.model, ParseWrap("block", "test"), {}, Dialect::kFsdp2, "test");
  AddExpertUnits(c.model, c.plan.units);
  return c;
}

// Sizes of the collectives of a step on a group.
std::vector<Bytes> BytesOn(const Program& program, OpCode code, const std::string& group) {
  std::vector<Bytes> bytes;
  for (const Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    if (shape.code == code && program.groups[shape.group.value].name == group) {
      bytes.push_back(shape.bytes);
    }
  }
  return bytes;
}

TEST_CASE("tokens that ranks cut: groups and collectives") {
  constexpr std::int64_t kLayers = 32;
  for (const bool recomputes : {false, true}) {
    for (const std::int64_t accumulation : {1, 3}) {
      Cut c = Of("llama-3-8b", 8, 2, 4);
      c.plan.accumulation = accumulation;
      if (recomputes) {
        c.plan.recompute = RecomputeBlocks(c.model, RecomputeKind::kFull, 1, "test");
      }
      const Program program = c.Lowered();
      for (const Finding& finding : Verify(program)) {
        FAIL_CHECK(finding.text);
      }
      const std::vector<Group>& groups = program.groups;
      CHECK(std::find(groups.begin(), groups.end(), Group{"cp", 4, 1}) != groups.end());
      CHECK(std::find(groups.begin(), groups.end(), Group{"shard", 8, 1}) != groups.end());
      CHECK(std::find(groups.begin(), groups.end(), Group{"replicate", 2, 8}) != groups.end());
      // Keys and values of 8 heads of 128, 256 tokens, 2 samples, in bf16.
      const Bytes all(std::int64_t{2} * 256 * 8 * 128 * 2);
      const std::vector<Bytes> gathers = BytesOn(program, OpCode::kAllGather, "cp");
      const std::vector<Bytes> scatters = BytesOn(program, OpCode::kReduceScatter, "cp");
      for (const auto* bytes : {&gathers, &scatters}) {
        CHECK(std::all_of(bytes->begin(), bytes->end(), [&](Bytes b) { return b == all; }));
      }
      CHECK(std::ssize(gathers) == accumulation * 2 * kLayers * (recomputes ? 2 : 1));
      CHECK(std::ssize(scatters) == accumulation * 2 * kLayers);
      std::int64_t masters = 0;
      for (const Buffer& buffer : program.buffers) {
        masters += buffer.category == Category::kParameterShard ? buffer.size.value : 0;
      }
      CHECK(masters == 4 * CountParameters(c.model) / 8);
    }
  }
}

TEST_CASE("tokens that ranks cut: a ring's transfers by closed form") {
  constexpr std::int64_t kLayers = 32, kRanks = 4;
  // Keys and values, which torch-eager copies to all 32 heads of 128, 64 tokens of a rank, 2
  // samples.
  const std::int64_t elements = std::int64_t{2} * 2 * 64 * 32 * 128;
  for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kRingGather}) {
    for (const bool recomputes : {false, true}) {
      Cut c = Of("llama-3-8b", 8, 1, kRanks, 1, method);
      if (recomputes) {
        c.plan.recompute = RecomputeBlocks(c.model, RecomputeKind::kFull, 1, "test");
      }
      const Program program = c.Lowered();
      for (const Finding& finding : Verify(program)) {
        FAIL_CHECK(finding.text);
      }
      const std::int64_t passes = kLayers * (recomputes ? 3 : 2);  // of keys and values
      const std::vector<Bytes> sent = BytesOn(program, OpCode::kPermute, "cp");
      const std::vector<Bytes> gathers = BytesOn(program, OpCode::kAllGather, "cp");
      const bool is_round = method == ContextMethod::kRing;
      CHECK(std::count(sent.begin(), sent.end(), Bytes(2 * elements)) ==
            (is_round ? passes * (kRanks - 1) : 0));
      CHECK(std::count(sent.begin(), sent.end(), Bytes(4 * elements)) == kLayers * kRanks);
      CHECK(std::ssize(sent) == kLayers * kRanks + (is_round ? passes * (kRanks - 1) : 0));
      CHECK(std::count(gathers.begin(), gathers.end(), Bytes(2 * elements * kRanks)) ==
            (is_round ? 0 : passes));
    }
  }
}

TEST_CASE("tokens that ranks cut: exchanges for heads by closed form") {
  constexpr std::int64_t kLayers = 32;
  for (const bool recomputes : {false, true}) {
    Cut c = Of("llama-3-8b", 8, 2, 4, 1, ContextMethod::kUlysses);
    if (recomputes) {
      c.plan.recompute = RecomputeBlocks(c.model, RecomputeKind::kFull, 1, "test");
    }
    const Program program = c.Lowered();
    for (const Finding& finding : Verify(program)) {
      FAIL_CHECK(finding.text);
    }
    // 64 tokens of a rank, 2 samples, in bf16: 32 heads of q and of the result, 8 of k and of v.
    const std::vector<Bytes> bytes = BytesOn(program, OpCode::kAllToAll, "cp");
    const std::int64_t passes = kLayers * (recomputes ? 3 : 2);
    CHECK(std::count(bytes.begin(), bytes.end(), Bytes(std::int64_t{2} * 64 * 8 * 128 * 2)) ==
          2 * passes);
    CHECK(std::count(bytes.begin(), bytes.end(), Bytes(std::int64_t{2} * 64 * 32 * 128 * 2)) ==
          2 * passes);
    CHECK(std::ssize(bytes) == 4 * passes);
  }
}

TEST_CASE("tokens that ranks cut: any dialect option of FSDP2 stays legal") {
  for (const SyncMode sync : {SyncMode::kEvery, SyncMode::kReplicateLast, SyncMode::kLast}) {
    for (const bool on_host : {false, true}) {
      Cut c = Of("llama-3-8b", 4, 2, 2);
      c.plan.accumulation = 2;
      c.plan.sync = sync;
      c.plan.offload.parameters = on_host && sync == SyncMode::kLast;
      CHECK(Verify(c.Lowered()).empty());
    }
  }
  // Experts over both axes: neighbours of 4, of which 2 have parts of the same tokens.
  const Program program = Of("mixtral-8x7b", 8, 1, 2, 4).Lowered();
  CHECK(Verify(program).empty());
  CHECK(std::ssize(BytesOn(program, OpCode::kAllGather, "cp")) == 2 * 32);
  CHECK(std::ssize(BytesOn(program, OpCode::kAllToAll, "ep")) == 5 * 32);
}

TEST_CASE("tokens that ranks cut: Verify finds gradients that lack ranks") {
  const Program good = Of("llama-3-8b", 4, 2, 2).Lowered();
  REQUIRE(Verify(good).empty());
  Program program = good;  // as if ranks with other tokens had the same gradients
  for (OpShape& shape : program.shapes) {
    if (shape.code == OpCode::kReduceScatter && program.groups[shape.group.value].name == "shard") {
      shape.divisor *= 2;
    }
  }
  const std::vector<Finding> findings = Verify(program);
  REQUIRE(!findings.empty());
  CHECK(findings.front().rule == 10);
}

TEST_CASE("tokens that ranks cut: plans that cannot be are refused") {
  const auto refusal = [](const Cut& c) {
    try {
      (void)c.Lowered();
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  Cut c = Of("llama-3-8b", 4, 1, 2);
  c.plan.dialect = Dialect::kNative;
  CHECK(refusal(c).find("dialect fsdp2 and torch 2.13 alone") != std::string::npos);
  CHECK(refusal(Of("llama-3-8b", 4, 2, 2, 1, ContextMethod::kRing)).find("without replicas") !=
        std::string::npos);
  c = Of("llama-3-8b", 3, 1, 2);
  CHECK(refusal(c).find("a divisor of shard_size 3") != std::string::npos);
  c = Of("llama-3-8b", 4, 1, 2);
  c.plan.context_size = 4;
  CHECK(refusal(c).find("one of so many parts of its tokens") != std::string::npos);
}

}  // namespace
}  // namespace shardwright
