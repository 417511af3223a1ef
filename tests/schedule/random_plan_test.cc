// Properties of every lowered program: Verify accepts it, op ids are unique, lowering twice gives
// the same program, and all transient memory is given back by the end of a step.

#include "tests/schedule/random_plan.h"

#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/print.h"
#include "schedule/verify.h"

namespace shardwright {
namespace {

using testing::DrawCase;
using testing::DrawMatrixRule;
using testing::LowerCase;
using testing::RandomCase;

// Bytes on device and host that exist after a body, given what existed before.
std::int64_t BytesAfter(const Program& program, const Body& body, std::vector<bool>& exists) {
  for (const MemoryPoint& p : body.points) {
    exists[p.buffer.value] = p.kind != PointKind::kFree;
  }
  std::int64_t bytes = 0;
  for (std::size_t b = 0; b < exists.size(); ++b) {
    bytes += exists[b] ? program.buffers[b].size.value : 0;
  }
  return bytes;
}

TEST_CASE("Lowered random plans are legal, unambiguous and reproducible") {
  const unsigned seed = 4242;
  CAPTURE(seed);
  std::mt19937 random(seed);
  for (int trial = 0; trial < 1000; ++trial) {
    RandomCase c = DrawCase(random);
    DrawMatrixRule(random, c);
    CAPTURE(trial);
    CAPTURE(c.description);
    const Program program = LowerCase(c);
    const auto findings = Verify(program);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
    for (const Body* body : {&program.init, &program.warmup, &program.step}) {
      std::set<std::string> names;
      for (const Op& op : body->ops) {
        const bool fresh = names.insert(OpName(program, op)).second;
        CHECK_MESSAGE(fresh, OpName(program, op));
      }
    }
    std::vector<bool> exists(program.buffers.size(), false);
    BytesAfter(program, program.init, exists);
    BytesAfter(program, program.warmup, exists);
    const std::int64_t first = BytesAfter(program, program.step, exists);
    CHECK(BytesAfter(program, program.step, exists) == first);
    if (trial % 50 == 0) {
      CHECK(Print(program) == Print(LowerCase(c)));
    }
  }
}

TEST_CASE("Lowered random plans whose loss runs in chunks are legal") {
  std::mt19937 random(4243);
  int chunked = 0;
  for (int trial = 0; trial < 500; ++trial) {
    const RandomCase c = DrawCase(random);
    CAPTURE(c.description);
    const KernelSetOptions whole = FindKernelSet(c.kernel_set, "test");
    const Program program = Lower({c.model, WithLossChunks(whole, 2 + trial % 3), c.job, c.plan});
    const auto findings = Verify(program);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
    const auto size = [](const Program& p) { return p.step.ops.size(); };
    chunked += size(program) < size(Lower({c.model, WithLossChunks(whole, 1), c.job, c.plan}));
  }
  CHECK(chunked >= 50);  // the loss is no op of its own there
}

// Wherever ValidatePlan takes packed states or frozen formats, the program is legal, and moves and
// keeps no more than without them.
TEST_CASE("Lowered random plans with packed states and weights are legal") {
  std::mt19937 random(4244);
  int packed_states = 0, packed_weights = 0;
  for (int trial = 0; trial < 600; ++trial) {
    RandomCase c = DrawCase(random);
    if (trial % 2 == 0) {
      c.job.optimizer.states = static_cast<StateFormat>(trial / 2 % 7);
      c.job.optimizer.kind = trial % 3 == 0 ? OptimizerKind::kLion : c.job.optimizer.kind;
      if (c.job.optimizer.states == StateFormat::kFp32 && trial % 3 == 1) {
        c.job.optimizer.kind = OptimizerKind::kAdafactor;
        c.job.optimizer.impl = OptimizerImpl::kForLoop;
      }
    } else {
      c.job.frozen_format = static_cast<FrozenFormat>(trial / 2 % 5);
      c.job.quantized_experts = trial % 3 == 1 && c.job.frozen_format > FrozenFormat::kParam;
      for (std::size_t p = 0; p < c.model.params.size(); ++p) {
        const ParamId tied = c.model.params[p].tied_to;
        c.model.params[p].trainable = tied.valid() ? c.model.params[tied.value].trainable
                                                   : p % 2 == 1 && c.model.params[p].trainable;
      }
    }
    RandomCase whole = c;
    whole.job.optimizer.states = StateFormat::kMaster;
    whole.job.optimizer.kind = OptimizerKind::kAdamW;
    whole.job.frozen_format = FrozenFormat::kMaster;
    whole.job.quantized_experts = false;
    try {
      ValidatePlan(c.model, c.job, c.plan, "test");
    } catch (const InputError&) {
      continue;
    }
    CAPTURE(c.description);
    const Program program = LowerCase(c);
    const auto findings = Verify(program);
    CHECK_MESSAGE(findings.empty(), (findings.empty() ? std::string() : findings.front().text));
    packed_states += c.job.optimizer.states != StateFormat::kMaster ? 1 : 0;
    packed_weights += c.job.frozen_format != FrozenFormat::kMaster ? 1 : 0;
    const auto parameters = [](const Program& p) {
      std::int64_t bytes = 0;
      for (const Buffer& b : p.buffers) {
        bytes += b.category == Category::kParameterShard ? b.size.value : 0;
      }
      return bytes;
    };
    CHECK(parameters(program) <= parameters(LowerCase(whole)));
  }
  CHECK(packed_states >= 20);
  CHECK(packed_weights >= 20);
}

}  // namespace
}  // namespace shardwright
