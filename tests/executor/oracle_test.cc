// Training in fp32 against fp64, within a bound that is computed beside the fp64 run.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/wrap.h"
#include "tests/executor/harness.h"
#include "tests/executor/tiny_oracle.h"
#include "tests/executor/tiny_training.h"

namespace shardwright::testing {
namespace {

Setup SgdSetup(Dialect dialect, std::int64_t ranks) {
  Setup setup = TinySetup(dialect, ranks);
  setup.job.optimizer.kind = OptimizerKind::kSgd;
  setup.training.optimizer.learning_rate = 0.1;
  setup.training.optimizer.weight_decay = 0.0;
  setup.steps = 2;
  return setup;
}

// How a batch is divided among ranks and micro-batches.
struct Cut {
  std::int64_t ranks = 1;
  bool clips = false;
  std::int64_t accumulation = 1;
};

std::vector<Cut> Cuts() {
  std::vector<Cut> cuts;
  for (const std::int64_t ranks : {1, 2, 3, 4, 8}) {
    cuts.push_back({ranks, false, 1});
    cuts.push_back({ranks, true, 1});
  }
  cuts.push_back({4, false, 3});
  cuts.push_back({4, true, 3});
  return cuts;
}

Setup SetupOf(const Cut& cut, Dialect dialect, std::int64_t replicas) {
  Setup setup = SgdSetup(dialect, cut.ranks);
  setup.plan.accumulation = cut.accumulation;
  setup.job.clip_gradients = cut.clips;
  setup.training.clip_norm = 0.05;
  if (replicas > 1) {
    setup.plan.shard_size = cut.ranks / replicas;
    setup.plan.replicate_size = replicas;
  }
  return setup;
}

}  // namespace

TEST_CASE("Oracle: fp32 training lies within the derived bound of fp64, however it is cut up") {
  BoundUse worst;
  for (const Cut& cut : Cuts()) {
    const Weights oracle = TinyOracle(SetupOf(cut, Dialect::kDdp, 1));
    for (const Dialect dialect : {Dialect::kDdp, Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1,
                                  Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
      const bool has_replicas = dialect != Dialect::kDdp;
      for (std::int64_t replicas = 1; replicas <= (has_replicas ? 2 : 1); ++replicas) {
        if (cut.ranks % replicas != 0) {
          continue;
        }
        const BoundUse use = CompareAll(Train(SetupOf(cut, dialect, replicas)).weights, oracle);
        CAPTURE(std::string(NameOf(dialect)));
        CAPTURE(cut.ranks);
        CAPTURE(replicas);
        CAPTURE(cut.clips);
        CAPTURE(cut.accumulation);
        CHECK(use.most <= 1.0);
        worst.most = std::max(worst.most, use.most);
        worst.bound = std::max(worst.bound, use.bound / use.largest);
      }
    }
  }
  MESSAGE("at most " << worst.most << " of the bound, which is at most " << worst.bound
                     << " of the largest weight");
  // A bound that anything passes would be worth nothing.
  CHECK(worst.bound < 2e-4);
  CHECK(worst.most > 0.001);
}

TEST_CASE("Oracle: a wrong divisor and a lost sample leave the bound") {
  Setup setup = SgdSetup(Dialect::kFsdp2, 4);
  const Weights oracle = TinyOracle(setup);
  setup.training.optimizer.learning_rate *= 1.001;
  CHECK(CompareAll(Train(setup).weights, oracle).most > 1.0);
  setup = SgdSetup(Dialect::kFsdp2, 4);
  setup.run.inputs = [](const BatchKey& key, std::span<const View> tensors) {
    BatchKey moved = key;
    moved.first_sample += key.first_sample == 6 ? 2 : 0;  // the last rank's
    FillTinyBatch(moved, tensors);
  };
  CHECK(CompareAll(Train(setup).weights, oracle).most > 1.0);
}

}  // namespace shardwright::testing
