// Layers that ranks cut, under FSDP2. Their order and sizes are compared with PyTorch's by
// torch_tensor.py; here are the groups, the collectives by closed form, and planted faults.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/cut_tensor.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/schedule/lowered.h"

namespace shardwright {
namespace {

using testing::Count;

struct Cut {
  Model model;
  Job job;
  Plan plan;

  [[nodiscard]] Program Lowered(const char* kernels = "torch-eager") const {
    return Lower({model, FindKernelSet(kernels, "test"), job, plan});
  }
};

// llama-3-8b, 32 layers, on `shard` x `replicate` x `tensor` ranks.
Cut Of(std::int64_t shard, std::int64_t replicate, std::int64_t tensor) {
  Cut c;
  LoadOptions options;
  options.sequence_length = c.job.sequence_length = 64;
  c.job.precision = testing::kMixed;
  c.model = LoadModel("llama-3-8b", options);
  CutTensor(c.model, tensor, "test");
  c.plan.shard_size = shard;
  c.plan.replicate_size = replicate;
  c.plan.tensor_size = tensor;
  c.plan.micro_batch = 2;
  c.plan.units = Wrap(c.model, ParseWrap("block", "test"), {}, Dialect::kFsdp2, "test");
  return c;
}

// Bytes of the collectives of a step on a group.
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

TEST_CASE("layers that ranks cut: groups and collectives") {
  constexpr std::int64_t kLayers = 32;
  for (const bool recomputes : {false, true}) {
    for (const std::int64_t accumulation : {1, 3}) {
      Cut c = Of(4, 2, 8);
      c.plan.accumulation = accumulation;
      if (recomputes) {
        c.plan.recompute = RecomputeBlocks(c.model, RecomputeKind::kFull, 1, "test");
      }
      const Program program = c.Lowered();
      for (const Finding& finding : Verify(program)) {
        FAIL_CHECK(finding.text);
      }
      const std::vector<Group>& groups = program.groups;
      CHECK(std::find(groups.begin(), groups.end(), Group{"tp", 8, 1}) != groups.end());
      CHECK(std::find(groups.begin(), groups.end(), Group{"shard", 4, 8}) != groups.end());
      CHECK(std::find(groups.begin(), groups.end(), Group{"replicate", 2, 32}) != groups.end());
      // (8 L + 4) collectives of A per micro-batch, 3 L more where blocks run again.
      const Bytes all_tokens(std::int64_t{2} * 64 * 4096 * 2);
      std::int64_t count = 0;
      for (const OpCode code : {OpCode::kAllGather, OpCode::kReduceScatter}) {
        const std::vector<Bytes> bytes = BytesOn(program, code, "tp");
        CHECK(std::all_of(bytes.begin(), bytes.end(), [&](Bytes b) { return b == all_tokens; }));
        count += std::ssize(bytes);
      }
      CHECK(count == accumulation * (8 * kLayers + 4 + (recomputes ? 3 * kLayers : 0)));
      // Three numbers per token for the loss; the gradient of every norm; norms for clipping.
      std::vector<Bytes> sums = BytesOn(program, OpCode::kAllReduce, "tp");
      CHECK(std::ssize(sums) == accumulation * (3 + 2 * kLayers + 1) + 1);
      CHECK(std::count(sums.begin(), sums.end(), Bytes(std::int64_t{2} * 64 * 4)) ==
            3 * accumulation);
      CHECK(std::count(sums.begin(), sums.end(), Bytes(4096 * 2)) ==
            accumulation * (2 * kLayers + 1));
      CHECK(sums.back() == Bytes((std::int64_t{9} * kLayers + 3) * 4));
    }
  }
}

TEST_CASE("layers that ranks cut: masters and a compiled loss") {
  const Cut c = Of(4, 1, 8);
  constexpr std::int64_t kNorms = 65 * 4096;
  for (const char* kernels : {"torch-eager", "torch-compile"}) {
    const Program program = c.Lowered(kernels);
    CHECK(Verify(program).empty());
    std::int64_t masters = 0;
    for (const Buffer& buffer : program.buffers) {
      masters += buffer.category == Category::kParameterShard ? buffer.size.value : 0;
    }
    CHECK(masters == 4 * ((CountParameters(c.model) - kNorms) / 8 + kNorms) / 4);
    CHECK(Count(program, OpCode::kAllReduce, "tp") == 3 + 65 + 1);
  }
  CHECK(Verify(Of(1, 1, 8).Lowered()).empty());
}

TEST_CASE("layers that ranks cut: Verify finds sums that lack ranks, or count them twice") {
  for (const SyncMode sync : {SyncMode::kEvery, SyncMode::kLast}) {
    Cut c = Of(4, 2, 2);
    c.plan.accumulation = 2;
    c.plan.sync = sync;
    const Program good = c.Lowered();
    REQUIRE(Verify(good).empty());
    Program program = good;
    program.partial_ops.clear();  // as if norms saw all tokens
    CHECK(!Verify(program).empty());
    program = good;  // a sum over ranks that are no parts of the layer
    const auto is = [&](const Group& group, const char* name) { return group.name == name; };
    for (OpShape& shape : program.shapes) {
      const bool is_of_norm = shape.code == OpCode::kAllReduce && shape.dtype != DType::kFp32 &&
                              is(program.groups[shape.group.value], "tp");
      const bool is_kept = shape.code == OpCode::kAllReduce && shape.bytes == Bytes(4096 * 4) &&
                           is(program.groups[shape.group.value], "tp");
      if (is_of_norm || is_kept) {
        shape.group = GroupId(0);
      }
    }
    const std::vector<Finding> findings = Verify(program);
    REQUIRE(!findings.empty());
    CHECK(findings.front().rule == 10);
    program = good;
    program.tensor_size = 1;
    CHECK(!Verify(program).empty());
  }
}

TEST_CASE("layers that ranks cut: Verify misses no sum of several in one buffer") {
  Cut c = Of(4, 2, 2);
  c.plan.accumulation = 2;
  c.plan.sync = SyncMode::kLast;  // a unit's gradients wait in one fp32 buffer
  Program program = c.Lowered();
  OpShape nothing = program.shapes.front();
  nothing.code = OpCode::kStreamWait;
  program.shapes.push_back(nothing);
  int sums = 0;
  for (Op& op : program.step.ops) {
    const OpShape& shape = program.ShapeOf(op);
    if (shape.code == OpCode::kAllReduce && shape.bytes == Bytes(4096 * 4) &&
        program.groups[shape.group.value].name == "tp" && ++sums <= 4) {
      const ShapeId was = op.shape;
      op.shape = ShapeId(program.shapes.size() - 1);
      const std::vector<Finding> findings = Verify(program);
      CHECK(std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
        return finding.text.find("is read before the ranks that cut layers have summed bytes") !=
               std::string::npos;
      }));
      op.shape = was;
    }
  }
  CHECK(sums == 65);  // two norms of each of 32 layers, and the last
  CHECK(Verify(program).empty());
}

TEST_CASE("layers that ranks cut: plans that cannot be are refused") {
  const auto refusal = [](const Cut& c, const char* kernels = "torch-eager") {
    try {
      (void)c.Lowered(kernels);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string("none");
  };
  Cut c = Of(4, 1, 2);
  c.plan.dialect = Dialect::kNative;
  CHECK(refusal(c).find("dialect fsdp2 and torch 2.13 alone") != std::string::npos);
  c = Of(4, 1, 2);
  c.plan.offload.optimizer = true;
  CHECK(refusal(c).find("without offload") != std::string::npos);
  c = Of(4, 1, 2);
  c.plan.tensor_size = 4;
  CHECK(refusal(c).find("one of so many parts of its layers") != std::string::npos);
  c = Of(4, 1, 2);
  c.job.precision.param = DType::kFp16;
  CHECK(refusal(c).find("fp32 and bf16 alone") != std::string::npos);
  c = Of(4, 1, 2);
  CHECK(refusal(c, "shardwright-host") == "none");
  CHECK(refusal(c, "shardwright-cuda").find("torch-eager or torch-compile") != std::string::npos);
  CHECK(refusal(c, "hf-liger").find("torch-eager or torch-compile") != std::string::npos);
}

// By hand, for 128 tokens of 4,096 features and an eighth of the weights: forward and, where blocks
// run again, once more, every gather runs beside all products that read it and every scatter beside
// the one that makes it; backward gathers beside the data gradients of o and down, scatters beside
// the head's, and beside those of q, k, v, gate and up where they are two products.
TEST_CASE("layers that ranks cut: products beside transfers") {
  Cut c = Of(4, 1, 8);
  c.plan.tensor_async = true;
  CHECK_THROWS_AS(c.Lowered(), InputError);
  constexpr double kLayers = 32, kPerWeight = 2 * 128 * 4096.0 / 8;
  constexpr double kQuery = 4096, kKeys = 1024, kInner = 14336, kWords = 128256;
  constexpr double kIn = kQuery + 2 * kKeys + 2 * kInner, kOut = kQuery + kInner;
  for (const bool recomputes : {false, true}) {
    for (const bool joins : {false, true}) {
      c.plan.recompute.clear();
      if (recomputes) {
        c.plan.recompute = RecomputeBlocks(c.model, RecomputeKind::kFull, 1, "test");
      }
      auto kernels = FindKernelSet("torch-compile", "test");
      kernels.joined_products = joins;
      const Program program = Lower({c.model, kernels, c.job, c.plan});
      CHECK(Verify(program).empty());
      double flops[2] = {};  // without backward, in it
      std::int64_t alone = 0;
      for (const Op& op : program.step.ops) {
        const OpShape& shape = program.ShapeOf(op);
        if (!InfoOf(shape.code).is_collective) {
          continue;
        }
        const bool moves =
            program.groups[shape.group.value].name == "tp" && shape.code != OpCode::kAllReduce;
        CHECK((moves || shape.kernel_count == 0));
        alone += moves && shape.kernel_count == 0 ? 1 : 0;
        for (const Kernel& kernel : program.KernelsOf(shape)) {
          flops[op.phase == Phase::kBackward ? 1 : 0] += kernel.flops.value;
        }
      }
      CHECK(alone == 2 + (joins ? 0 : 2 * kLayers));  // of the embedding, both ways
      // A block that runs again stops before its last product, whose result nothing keeps.
      const double again = recomputes ? kIn + kQuery : 0;
      CHECK(flops[0] == doctest::Approx(kPerWeight * (kLayers * (kIn + kOut + again) + kWords)));
      CHECK(flops[1] ==
            doctest::Approx(kPerWeight * (kLayers * (kOut + (joins ? kIn : 0)) + kWords)));
    }
  }
}

}  // namespace
}  // namespace shardwright
