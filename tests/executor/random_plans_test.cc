// Hundreds of random plans on real models: Llama-, GPT-2- and T5-like and the MNIST ConvNet, with
// the host kernels. The expected values are those of unsharded data parallel (DDP without any
// choice) on as many ranks; where sums are made in another order, fp64 sums of the gradients that
// one rank alone computes for each micro-batch, with a bound for every order (bounded.h).

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "executor/data/batch.h"
#include "schedule/wrap.h"
#include "tests/executor/bounded.h"
#include "tests/executor/harness.h"
#include "tests/sanitizers.h"
#include "tests/schedule/random_plan.h"

namespace shardwright::testing {
namespace {

constexpr double kRate = 0.02;

bool HasLoss(const Model& model) {
  return std::any_of(model.ops.begin(), model.ops.end(), [&](const ModelOp& op) {
    return model.tensors[op.outputs[0].value].role == TensorRole::kLoss;
  });
}

Setup SetupOf(const RandomCase& c, const Plan& plan, const Dataset& data) {
  Setup setup;
  setup.model = c.model;
  setup.job = c.job;
  setup.job.mode = JobMode::kTrain;
  setup.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  setup.plan = plan;
  setup.training = DefaultTrainingOptions(setup.job);
  setup.training.optimizer.learning_rate = kRate;
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

// Native adds each chunk of a loss to the sum of the micro-batches before; others add the sum of a
// micro-batch's chunks, as PyTorch does.
bool AddsChunkByChunk(const Plan& plan) {
  return plan.dialect == Dialect::kNative && plan.accumulation > 1 && plan.sync == SyncMode::kLast;
}

// The last step changes the weights, those before it leave them as they are to the last bit: then
// the gradients of the last step belong to the first weights under every plan.
void MoveInTheLastStepOnly(Setup& setup) {
  setup.training.optimizer.weight_decay = 0.0;
  setup.training.optimizer.learning_rate = 1e-50;  // 0 in fp32
  setup.training.schedule = {.kind = ScheduleKind::kStep, .gamma = kRate * 1e50};
  setup.training.clip_norm = 0.05;
}

// What is summed to the gradient of a parameter, element by element: one vector per micro-batch, or
// two and more where several ops share a weight.
using Terms = std::vector<std::vector<Vector>>;  // by parameter

// Calls the host kernels, and keeps the gradients of shared weights, which the plan adds up.
class SharedWeights {
 public:
  SharedWeights(const Model& model, const std::vector<std::vector<float>>& first, Terms& terms)
      : first_(first), terms_(terms), is_shared_(model.params.size()) {
    for (const Parameter& p : model.params) {
      if (p.tied_to.valid()) {
        is_shared_[p.tied_to.value] = true;
      }
    }
  }

  void Run(const ModelOpCall& call, bool is_backward) {
    HostKernel(call, is_backward);
    for (std::size_t k = 0; k < call.param_grads.size(); ++k) {
      const View& grad = call.param_grads[k].view;
      const std::size_t p = SharedIndex(grad, call.params[k]);
      if (p == first_.size()) {
        continue;
      }
      REQUIRE(!call.param_grads[k].accumulate);
      const auto* data = static_cast<const float*>(grad.data);
      Vector& term = terms_[p].emplace_back();
      for (std::int64_t i = 0; i < grad.elements; ++i) {
        term.push_back({static_cast<double>(data[i]), 0.0});
      }
    }
  }
  [[nodiscard]] bool IsShared(std::size_t p) const { return is_shared_[p]; }

 private:
  // The number of weights: none. A table of ids reads no weights in backward; a matrix is known by
  // its own, which are random.
  [[nodiscard]] std::size_t SharedIndex(const View& grad, const ConstView& weight) const {
    const auto* data = reinterpret_cast<const float*>(weight.data);
    std::size_t p = 0;
    while (p < first_.size() &&
           !(is_shared_[p] && grad.data != nullptr && grad.elements == std::ssize(first_[p]) &&
             (data == nullptr || std::equal(first_[p].begin(), first_[p].end(), data)))) {
      ++p;
    }
    return p;
  }

  const std::vector<std::vector<float>>& first_;
  Terms& terms_;
  std::vector<bool> is_shared_;
};

// Adds micro-batch `index` of step `step`, as one rank alone computes its gradients at the first
// weights. They are read off an update with a learning rate that is a large power of two: that is
// off by a rounding of the weight after it.
void AddTerms(const RandomCase& c, const Dataset& data, std::int64_t index, std::int64_t step,
              const std::vector<std::vector<float>>& first, Terms& terms) {
  Plan plan = UnshardedPlan(c);
  plan.replicate_size = plan.accumulation = 1;
  Setup setup = SetupOf(c, plan, data);
  setup.job.clip_gradients = false;
  setup.training.optimizer.weight_decay = 0.0;
  setup.training.optimizer.learning_rate = 0x1p20;
  setup.steps = 1;
  const std::int64_t first_sample = index * c.plan.micro_batch;
  const auto inputs = SetupOf(c, c.plan, data).run.inputs;
  setup.run.inputs = [&](const BatchKey& key, std::span<const View> views) {
    inputs({step, first_sample + key.first_sample, key.count}, views);
  };
  SharedWeights shared(c.model, first, terms);
  setup.kernel = [&](const ModelOpCall& call, bool is_backward) {
    ModelOpCall moved = call;
    moved.dropout.step = static_cast<std::uint64_t>(step);
    moved.dropout.first_sample += first_sample;
    shared.Run(moved, is_backward);
  };
  const std::vector<std::vector<float>> after = Train(setup).weights;
  for (std::size_t p = 0; p < first.size(); ++p) {
    if (shared.IsShared(p)) {
      continue;
    }
    Vector& term = terms[p].emplace_back();
    for (std::size_t i = 0; i < first[p].size(); ++i) {
      const double w = after[p][i];
      term.push_back({(first[p][i] - w) * 0x1p-20, kUnit * std::abs(w) * 0x1p-20});
    }
  }
}

// The weights behind the only step that changes them.
Weights Oracle(const RandomCase& c, const Setup& setup, const Dataset& data) {
  Setup untrained = setup;
  untrained.steps = 0;
  const std::vector<std::vector<float>> first = Train(untrained).weights;
  const std::int64_t count = c.plan.shard_size * c.plan.replicate_size * c.plan.accumulation;
  Terms terms(first.size());
  for (std::int64_t i = 0; i < count; ++i) {
    AddTerms(c, data, i, setup.steps - 1, first, terms);
  }
  Weights gradients;
  for (std::size_t p = 0; p < first.size(); ++p) {
    gradients.emplace_back();
    for (std::size_t i = 0; i < first[p].size(); ++i) {
      Sum sum;
      for (const Vector& term : terms[p]) {
        sum.Add(term[i]);
      }
      gradients.back().push_back(sum.Total(kDivisions) / Bounded{static_cast<double>(count), 0.0});
    }
  }
  if (c.job.clip_gradients) {
    Clip(gradients, setup.training.clip_norm);
  }
  Weights weights = Exactly(first);
  Descend(weights, Rounded(-kRate, 0.0), gradients);
  return weights;
}

}  // namespace

TEST_CASE("Runtime: random plans train like unsharded data parallel") {
  const int count = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 500 : kHasSanitizer ? 10 : 30;
  std::mt19937 random(20260730);
  int exact_count = 0, close_count = 0;
  BoundUse worst;
  while (exact_count + close_count < count) {
    RandomCase c = DrawCase(random);
    if (c.plan.shard_size * c.plan.replicate_size > 8 || !HasLoss(c.model)) {
      continue;
    }
    if (IsZero(c.plan.dialect)) {  // the default bucket is 2 GB
      c.plan.zero.reduce_bucket = 1 + static_cast<std::int64_t>(random() % 20000);
    }
    c.job.clip_gradients = c.job.clip_gradients && random() % 2 == 0;
    // Sums are made in the order of DDP unless replicas, clipping or repeated reductions change it.
    const bool is_exact = (c.plan.replicate_size == 1 || c.plan.dialect == Dialect::kDdp) &&
                          !c.job.clip_gradients &&
                          (c.plan.accumulation == 1 || c.plan.sync == SyncMode::kLast ||
                           c.plan.shard_size == 1 || c.plan.dialect == Dialect::kZero1);
    if (!is_exact) {
      c.job.optimizer.kind = OptimizerKind::kSgd;  // Adam makes updates of any rounding error
    }
    CAPTURE(c.description);
    if (std::getenv("SHARDWRIGHT_VERBOSE") != nullptr) {
      MESSAGE(c.description);
    }
    const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
    Setup unsharded = SetupOf(c, UnshardedPlan(c), *data);
    Setup setup = SetupOf(c, c.plan, *data);
    if (is_exact && !AddsChunkByChunk(c.plan)) {  // the bound does not know chunks' order
      setup.loss_chunks = unsharded.loss_chunks = 1 + std::ssize(c.plan.units) % 3;
    }
    if (!is_exact) {
      MoveInTheLastStepOnly(unsharded);
      MoveInTheLastStepOnly(setup);
    }
    const Outcome expected = Train(unsharded);
    const Outcome outcome = Train(setup);
    CHECK(outcome.findings == std::vector<std::string>{});
    CHECK(outcome.replicas_agree);
    CHECK(outcome.losses == expected.losses);
    if (is_exact) {
      ++exact_count;
      CHECK(outcome.weights == expected.weights);
    } else {
      ++close_count;
      const BoundUse use = CompareAll(outcome.weights, Oracle(c, setup, *data));
      CHECK(use.most <= 1.0);
      worst.most = std::max(worst.most, use.most);
      worst.bound = std::max(worst.bound, use.bound / use.largest);
    }
  }
  MESSAGE(exact_count << " plans bit-equal, " << close_count << " within the bound: " << worst.most
                      << " of it at most; it is at most " << worst.bound
                      << " of the largest weight");
  CHECK(exact_count >= count / 10);
  // A bound that anything passes would be worth nothing.
  CHECK(worst.bound < 2e-4);
  CHECK(worst.most > 0.001);
}

// The folds over ranks and over micro-batches are the same: left to right in fp32, divided once.
TEST_CASE("Runtime: W ranks with one micro-batch train like one rank with W under random plans") {
  const int count = std::getenv("SHARDWRIGHT_DEEP") != nullptr ? 500 : kHasSanitizer ? 5 : 20;
  std::mt19937 random(20260731);
  for (int done = 0; done < count;) {
    RandomCase c = DrawCase(random);
    if (!HasLoss(c.model)) {
      continue;
    }
    ++done;
    c.job.clip_gradients = false;
    c.plan.shard_size = c.plan.replicate_size = 1;
    c.plan.accumulation = std::array{2, 3, 4, 8}[random() % 4];
    if (c.plan.sync == SyncMode::kReplicateLast) {
      c.plan.sync = SyncMode::kEvery;
    }
    if (IsZero(c.plan.dialect)) {  // the default bucket is 2 GB
      c.plan.zero.reduce_bucket = 20000;
    }
    for (UnitPlan& unit : c.plan.units) {
      if (unit.reshard.kind == Reshard::Kind::kToGroup) {
        unit.reshard = {};
      }
    }
    if (c.plan.dialect == Dialect::kFsdp1 && c.plan.offload.parameters) {
      c.plan.sync = SyncMode::kLast;  // it adds nothing to gradients that are on the host
    }
    RandomCase ranks = c;
    ranks.plan.shard_size = c.plan.accumulation;
    ranks.plan.accumulation = 1;
    CAPTURE(c.description);
    const std::unique_ptr<Dataset> data = OpenDataset("random:64", c.model, 3);
    Setup unsharded = SetupOf(ranks, UnshardedPlan(ranks), *data);
    Setup setup = SetupOf(c, c.plan, *data);
    if (!AddsChunkByChunk(c.plan)) {
      setup.loss_chunks = unsharded.loss_chunks = 1 + done % 3;
    }
    const Outcome expected = Train(unsharded);
    const Outcome outcome = Train(setup);
    CHECK(outcome.findings == std::vector<std::string>{});
    CHECK(outcome.losses == expected.losses);
    CHECK(outcome.weights == expected.weights);
  }
}

}  // namespace shardwright::testing
