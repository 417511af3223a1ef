// The programs of all dialects for one small model, as text. A change to one dialect's lowering
// file may change that dialect's file only. SHARDWRIGHT_UPDATE_GOLDEN=1 rewrites the files; review
// the diff.

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include <doctest/doctest.h>

#include "models/kernel_set.h"
#include "schedule/lower.h"
#include "schedule/print.h"
#include "schedule/verify.h"
#include "tests/schedule/chain_model.h"

namespace shardwright {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the chain model's three functions

std::string ReadFile(const std::string& name) {
  std::ifstream in(name, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// Two checkpointed blocks, hybrid over 2 x 2 ranks, mixed precision, clipping and AdamW: each
// dialect shows its gathers, reductions, copies, waits and memory points on about 40 ops.
std::string GoldenProgram(Dialect dialect) {
  ChainSpec spec;
  spec.blocks = 2;
  spec.linears = 2;
  spec.width = 6;
  spec.stem = 4;
  Plan plan = ChainPlan(spec, dialect, dialect == Dialect::kDdp ? 1 : 2);
  plan.replicate_size = 2;
  if (IsZero(dialect)) {
    // A bucket that two blocks' gradients fill, and no persistent parameters: they are all small.
    plan.units.back().reshard = Reshard();
    plan.zero.reduce_bucket = 100;
    if (dialect == Dialect::kZero3) {
      plan.zero.persistence_threshold = 30;
      plan.zero.prefetch_bucket = 72;
      plan.zero.max_reuse_distance = 0;
    }
  }
  if (dialect == Dialect::kDdp) {
    const UnitPlan root = plan.units.back();
    plan.units = {root};
  }
  for (int b = 0; b < spec.blocks; ++b) {
    plan.recompute.push_back({"block" + std::to_string(b), RecomputeKind::kFull, 1});
  }
  const Model model = ChainModel(spec);
  Job job = ChainJob(spec, {DType::kFp32, DType::kBf16, DType::kFp32});
  job.clip_gradients = true;
  const Program program = Lower({model, FindKernelSet("torch-eager", "test"), job, plan});
  CHECK(Verify(program).empty());
  return Print(program);
}

TEST_CASE("Golden programs") {
  for (const Dialect dialect : {Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kDdp,
                                Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    const std::string file = "data/golden/" + std::string(NameOf(dialect)) + ".txt";
    const std::string text = GoldenProgram(dialect);
    if (std::getenv("SHARDWRIGHT_UPDATE_GOLDEN") != nullptr) {
      std::ofstream(file, std::ios::binary) << text;
    }
    CAPTURE(file);
    CHECK(ReadFile(file) == text);
  }
}

}  // namespace
}  // namespace shardwright
