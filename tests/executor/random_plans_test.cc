// Hundreds of random plans on real models: Llama-, GPT-2- and T5-like and the MNIST ConvNet, with
// the host kernels. The expected values are those of unsharded data parallel (DDP without any
// choice) on as many ranks.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "executor/data/batch.h"
#include "executor/host/kernels/table.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"
#include "tests/sanitizers.h"
#include "tests/schedule/random_plan.h"

namespace shardwright::testing {
namespace {

void HostKernel(const ModelOpCall& call, bool is_backward) {
  if (is_backward) {
    BackwardOnHost(call);
  } else {
    ForwardOnHost(call);
  }
}

bool HasTies(const Model& model) {
  return std::any_of(model.params.begin(), model.params.end(),
                     [](const Parameter& p) { return p.tied_to.valid(); });
}

Setup SetupOf(const RandomCase& c, const Plan& plan, const Dataset& data) {
  Setup setup;
  setup.model = c.model;
  setup.job = c.job;
  setup.job.mode = JobMode::kTrain;
  setup.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  setup.plan = plan;
  setup.training = DefaultTrainingOptions(setup.job);
  setup.training.optimizer.learning_rate = 0.02;
  setup.kernel = HostKernel;
  setup.steps = 2;
  const Sampler sampler{
      data.size(), plan.shard_size * plan.replicate_size * plan.micro_batch * plan.accumulation};
  setup.run.inputs = [&c, &data, sampler](const BatchKey& key, std::span<const View> views) {
    WriteBatch(c.model, data, sampler, {key.step, key.first_sample, key.count}, views);
  };
  return setup;
}

// The same ranks, micro-batches and synchronisation; nothing sharded, nothing chosen.
Plan UnshardedPlan(const RandomCase& c) {
  Plan plan;
  plan.dialect = Dialect::kDdp;
  plan.replicate_size = c.plan.shard_size * c.plan.replicate_size;
  plan.micro_batch = c.plan.micro_batch;
  plan.accumulation = c.plan.accumulation;
  const bool is_last = c.plan.sync == SyncMode::kLast || c.plan.dialect == Dialect::kZero1;
  plan.sync = is_last ? SyncMode::kLast : SyncMode::kEvery;
  plan.units = Wrap(c.model, ParseWrap("root", "test"), {}, plan.dialect, "test");
  return plan;
}

}  // namespace

TEST_CASE("Runtime: random plans train like unsharded data parallel") {
  const int count = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 500 : kHasSanitizer ? 10 : 30;
  std::mt19937 random(20260730);
  int exact_count = 0, close_count = 0;
  while (exact_count + close_count < count) {
    RandomCase c = DrawCase(random);
    // FairScale divides as PyTorch's FSDP1 does, in places that depend on the plan.
    const bool is_ours = c.plan.dialect != Dialect::kFairscale;
    const bool has_loss =
        std::any_of(c.model.ops.begin(), c.model.ops.end(), [&](const ModelOp& op) {
          return c.model.tensors[op.outputs[0].value].role == TensorRole::kLoss;
        });
    if (c.plan.shard_size * c.plan.replicate_size > 8 || !is_ours || !has_loss) {
      continue;
    }
    if (IsZero(c.plan.dialect)) {  // the default bucket is 2 GB
      c.plan.zero.reduce_bucket = 1 + static_cast<std::int64_t>(random() % 20000);
    }
    c.job.clip_gradients = c.job.clip_gradients && random() % 2 == 0;
    // Sums are made in the order of DDP unless replicas, clipping or repeated reductions, or two
    // gradients of one tied weight per micro-batch, change it.
    const bool is_exact =
        (c.plan.replicate_size == 1 || c.plan.dialect == Dialect::kDdp) && !c.job.clip_gradients &&
        (c.plan.accumulation == 1 ||
         (!HasTies(c.model) && (c.plan.sync == SyncMode::kLast || c.plan.shard_size == 1 ||
                                c.plan.dialect == Dialect::kZero1)));
    if (!is_exact) {
      c.job.optimizer.kind = OptimizerKind::kSgd;  // Adam makes updates of any rounding error
    }
    CAPTURE(c.description);
    if (std::getenv("SHARDWRIGHT_VERBOSE") != nullptr) {
      MESSAGE(c.description);
    }
    const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
    const Outcome expected = Train(SetupOf(c, UnshardedPlan(c), *data));
    const Outcome outcome = Train(SetupOf(c, c.plan, *data));
    CHECK(outcome.findings == std::vector<std::string>{});
    CHECK(outcome.replicas_agree);
    if (is_exact) {
      ++exact_count;
      CHECK(outcome.losses == expected.losses);
      CHECK(outcome.weights == expected.weights);
    } else {
      ++close_count;
      // fp32 sums of a few hundred terms in another order, see runtime_test.cc.
      CHECK(RelativeDifference(outcome, expected) < 100 * 6e-8 * 10);
    }
  }
  MESSAGE(exact_count << " plans bit-equal, " << close_count << " within the bound");
  CHECK(exact_count >= count / 6);
}

}  // namespace shardwright::testing
