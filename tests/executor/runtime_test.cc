// Training under every dialect and feature against unsharded data parallel, with plain kernels.
// Expected values: the same run under DDP on as many ranks, which shards nothing. Where sums are
// made in another order, an fp64 oracle with a bound on the rounding errors (tiny_oracle.h).

#include "executor/runtime.h"

#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"
#include "tests/executor/tiny_oracle.h"
#include "tests/executor/tiny_training.h"

namespace shardwright::testing {
namespace {

const std::vector<Dialect> kSharding = {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative};
const std::vector<Dialect> kMixing = {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                      Dialect::kZero1, Dialect::kZero2, Dialect::kZero3};

const std::vector<Dialect> kZero = {Dialect::kZero1, Dialect::kZero2, Dialect::kZero3};
const std::vector<Dialect> kAll = {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                   Dialect::kZero1, Dialect::kZero2, Dialect::kZero3};

void CheckEqual(const Outcome& outcome, const Outcome& expected) {
  CHECK(outcome.losses == expected.losses);
  CHECK(outcome.weights == expected.weights);
  CHECK(outcome.replicas_agree);
  CHECK(outcome.findings == std::vector<std::string>{});
}

// Where sums are made in another order: within the bound of the fp64 oracle, which must say more
// than that the largest weight has its size.
void CheckClose(const Setup& setup, const Weights& oracle) {
  const Outcome outcome = Train(setup);
  const BoundUse use = CompareAll(outcome.weights, oracle);
  CHECK(use.most <= 1.0);
  CHECK(use.bound < 1e-3 * use.largest);
  CHECK(outcome.replicas_agree);
  CHECK(outcome.findings == std::vector<std::string>{});
}

void ReshardTo(Plan& plan, Reshard reshard) {
  for (UnitPlan& unit : plan.units) {
    unit.reshard = reshard;
  }
}

struct Choice {
  std::string name;
  std::vector<Dialect> dialects;
  std::function<void(Setup&)> make;
};

std::vector<Choice> ZeroChoices() {
  return {
      {"zero with one large bucket", kZero, [](Setup& s) { s.plan.zero.reduce_bucket = 10000; }},
      {"zero with buckets smaller than a gradient", kZero,
       [](Setup& s) { s.plan.zero.reduce_bucket = 20; }},
      {"zero with gradients where they are", kZero,
       [](Setup& s) { s.plan.zero.contiguous_gradients = false; }},
      {"zero with overlap", kZero, [](Setup& s) { s.plan.zero.overlap_comm = Overlap::kOn; }},
      {"zero without overlap", kZero, [](Setup& s) { s.plan.zero.overlap_comm = Overlap::kOff; }},
      {"zero recompute", kZero,
       [](Setup& s) {
         s.plan.recompute = RecomputeBlocks(s.model, RecomputeKind::kFull, 1, "test");
       }},
      {"zero with reduce-scatter",
       {Dialect::kZero1, Dialect::kZero2},
       [](Setup& s) { s.plan.zero.gradient_reduction = GradientReduction::kReduceScatter; }},
      {"zero with weights gathered bucket by bucket",
       {Dialect::kZero1, Dialect::kZero2},
       [](Setup& s) { s.plan.zero.allgather_bucket = 52; }},
      {"zero3 with all-reduce",
       {Dialect::kZero3},
       [](Setup& s) { s.plan.zero.gradient_reduction = GradientReduction::kAllReduce; }},
      {"zero3 with all-reduce of gradients where they are",
       {Dialect::kZero3},
       [](Setup& s) {
         s.plan.zero.gradient_reduction = GradientReduction::kAllReduce;
         s.plan.zero.contiguous_gradients = false;
       }},
      {"zero3 with all-reduce of whole buckets, some of them empty",
       {Dialect::kZero3},
       [](Setup& s) {
         s.plan.zero.gradient_reduction = GradientReduction::kAllReduce;
         s.plan.zero.before_deepspeed_0_6 = true;
         s.plan.zero.reduce_bucket = 20;
       }},
      {"zero3 with the optimizer on the host",
       {Dialect::kZero3},
       [](Setup& s) { s.plan.offload.optimizer = true; }},
      {"zero3 with the parameters on the host",
       {Dialect::kZero3},
       [](Setup& s) { s.plan.offload.parameters = true; }},
      {"zero3 with the parameters on the host and a module per gather",
       {Dialect::kZero3},
       [](Setup& s) {
         s.plan.offload.parameters = true;
         s.plan.zero.persistence_threshold = 0;
         s.plan.zero.prefetch_bucket = 0;
         s.plan.zero.overlap_comm = Overlap::kOff;
       }},
      {"zero3 without persistent parameters",
       {Dialect::kZero3},
       [](Setup& s) { s.plan.zero.persistence_threshold = 0; }},
      {"zero3 without prefetch",
       {Dialect::kZero3},
       [](Setup& s) {
         s.plan.zero.persistence_threshold = 10;
         s.plan.zero.prefetch_bucket = 0;
       }},
      {"zero3 with small sub-groups",
       {Dialect::kZero3},
       [](Setup& s) {
         s.plan.zero.persistence_threshold = 10;
         s.plan.zero.sub_group = 30;
         s.plan.zero.max_live_parameters = 100;
       }},
  };
}

std::vector<Choice> Choices() {
  const std::vector<Dialect> two = {Dialect::kFsdp2, Dialect::kNative};
  return {
      {"reshard never", kSharding,
       [](Setup& s) {
         ReshardTo(s.plan, {Reshard::Kind::kNever, 0});
       }},
      {"reshard to 2", two,
       [](Setup& s) {
         ReshardTo(s.plan, {Reshard::Kind::kToGroup, 2});
       }},
      {"recompute", kSharding,
       [](Setup& s) {
         s.plan.recompute = RecomputeBlocks(s.model, RecomputeKind::kFull, 1, "test");
       }},
      {"selective recompute", kSharding,
       [](Setup& s) {
         s.plan.recompute = RecomputeBlocks(s.model, RecomputeKind::kSelective, 2, "test");
       }},
      {"one unit", kSharding,
       [](Setup& s) {
         s.plan.units = Wrap(s.model, ParseWrap("root", "test"), {}, s.plan.dialect, "test");
       }},
      {"small units", kSharding,
       [](Setup& s) {
         s.plan.units = Wrap(s.model, ParseWrap("size:40", "test"), {}, s.plan.dialect, "test");
       }},
      {"offload of parameters", kSharding, [](Setup& s) { s.plan.offload.parameters = true; }},
      {"offload of the optimizer",
       {Dialect::kNative},
       [](Setup& s) { s.plan.offload.optimizer = true; }},
      {"offload of moments",
       {Dialect::kNative},
       [](Setup& s) {
         s.plan.offload.moments = true;
         s.plan.moments_piece = Bytes(100);
       }},
      {"offload of activations", kSharding,
       [](Setup& s) {
         s.plan.offload.activations = true;
         s.plan.micro_batch = 2;
       }},
      {"prefetch lists", two,
       [](Setup& s) {
         s.plan.units[0].forward_prefetch = {"block1", "block2"};
         s.plan.units[2].backward_prefetch = {"block1", "block0"};
       }},
      {"in flight", {Dialect::kNative}, [](Setup& s) { s.plan.in_flight = 4; }},
      {"in turn", {Dialect::kNative}, [](Setup& s) { s.plan.transfers = Transfers::kInTurn; }},
      {"fsdp1 prefetch", {Dialect::kFsdp1}, [](Setup& s) { s.plan.forward_prefetch = true; }},
      {"fsdp1 post",
       {Dialect::kFsdp1},
       [](Setup& s) { s.plan.backward_prefetch = BackwardPrefetch::kPost; }},
      {"fsdp1 without limiter",
       {Dialect::kFsdp1},
       [](Setup& s) { s.plan.limit_all_gathers = false; }},
      {"fsdp1 flat parameters",
       {Dialect::kFsdp1},
       [](Setup& s) { s.plan.use_orig_params = false; }},
  };
}

// `tied`: layers share a weight, so that each adds a gradient of its own in every micro-batch.
void CheckRanksAreMicroBatches(std::int64_t ranks, bool tied) {
  const auto setup_of = [&](Dialect dialect, std::int64_t count) {
    Setup setup = TinySetup(dialect, count);
    if (tied) {
      setup.model = TinyNetwork(3, true);
      setup.plan.units = Wrap(setup.model, ParseWrap("root", "test"), {}, dialect, "test");
    }
    return setup;
  };
  const Outcome expected = Train(setup_of(Dialect::kDdp, ranks));
  for (const Dialect dialect : {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    for (const SyncMode sync : {SyncMode::kEvery, SyncMode::kLast}) {
      CAPTURE(ranks);
      CAPTURE(tied);
      CAPTURE(std::string(NameOf(dialect)));
      if (sync == SyncMode::kLast && IsZero(dialect)) {
        continue;  // there it is not for the plan to say
      }
      Setup setup = setup_of(dialect, 1);
      setup.plan.accumulation = ranks;
      setup.plan.sync = sync;
      CheckEqual(Train(setup), expected);
    }
  }
}

}  // namespace

TEST_CASE("Runtime: every dialect trains like unsharded data parallel, bit for bit") {
  for (const std::int64_t ranks : {1, 2, 3, 4, 8}) {
    const Outcome expected = Train(TinySetup(Dialect::kDdp, ranks));
    CHECK(expected.losses.size() == 3);
    CHECK(expected.replicas_agree);
    for (const Dialect dialect : kAll) {
      CAPTURE(ranks);
      CAPTURE(std::string(NameOf(dialect)));
      CheckEqual(Train(TinySetup(dialect, ranks)), expected);
    }
  }
}

// A layer's weight and bias may lie in two of them, also of layers that share a weight.
TEST_CASE("Runtime: how DDP's buckets are cut changes no bit") {
  for (const bool tied : {false, true}) {
    const auto train = [&](std::int64_t bucket) {
      Setup setup = TinySetup(Dialect::kDdp, 3);
      if (tied) {
        setup.model = TinyNetwork(3, true);
        setup.plan.units = Wrap(setup.model, ParseWrap("root", "test"), {}, Dialect::kDdp, "test");
      }
      setup.plan.accumulation = 2;
      setup.plan.first_bucket = setup.plan.bucket = Bytes(bucket);
      return Train(setup);
    };
    const Outcome expected = train(1 << 20);  // all in one
    for (const std::int64_t bucket : {1, 40, 200, 500}) {
      CAPTURE(tied);
      CAPTURE(bucket);
      CheckEqual(train(bucket), expected);
    }
  }
}

TEST_CASE("Runtime: where moments visit the device in pieces each gradient is divided once") {
  Setup setup = TinySetup(Dialect::kNative, 4);
  setup.plan.accumulation = 2;  // by which an update without a norm divides
  setup.job.clip_gradients = false;
  const Outcome expected = Train(setup);
  setup.plan.offload.moments = true;
  setup.plan.moments_piece = Bytes(100);  // several pieces of each shard
  CheckEqual(Train(setup), expected);
}

TEST_CASE("Runtime: a network learns") {
  Setup setup = TinySetup(Dialect::kFsdp2, 2);
  setup.plan.micro_batch = 16;
  setup.steps = 150;
  const std::vector<double> losses = Train(setup).losses;
  const auto mean = [&](std::size_t begin) {
    return std::accumulate(losses.begin() + static_cast<std::ptrdiff_t>(begin),
                           losses.begin() + static_cast<std::ptrdiff_t>(begin) + 10, 0.0) /
           10;
  };
  CHECK(mean(140) < 0.85 * mean(0));  // chance is ln 6, the mean of the first steps
}

TEST_CASE("Runtime: W ranks with one micro-batch equal one rank with W micro-batches") {
  for (const std::int64_t ranks : {2, 3, 4, 8}) {
    CheckRanksAreMicroBatches(ranks, false);
    CheckRanksAreMicroBatches(ranks, true);
  }
}

TEST_CASE("Runtime: what a plan chooses changes no bit") {
  const std::int64_t ranks = 4;
  const Outcome expected = Train(TinySetup(Dialect::kDdp, ranks));
  std::vector<Choice> choices = Choices();
  for (Choice& choice : ZeroChoices()) {
    choices.push_back(std::move(choice));
  }
  for (const Choice& choice : choices) {
    for (const Dialect dialect : choice.dialects) {
      CAPTURE(choice.name);
      CAPTURE(std::string(NameOf(dialect)));
      Setup setup = TinySetup(dialect, ranks);
      choice.make(setup);
      CheckEqual(Train(setup), expected);
    }
  }
}

TEST_CASE("Runtime: frozen parameters keep their values, the others train alike") {
  const auto freeze = [](Setup& s) {
    for (std::size_t p = 0; p < s.model.params.size(); p += 3) {
      s.model.params[p].trainable = false;
    }
  };
  for (const std::int64_t ranks : {1, 3, 4}) {
    Setup reference = TinySetup(Dialect::kDdp, ranks);
    reference.steps = 0;
    const Outcome before = Train(reference);
    reference.steps = 3;
    freeze(reference);
    const Outcome expected = Train(reference);
    for (std::size_t p = 0; p < expected.weights.size(); ++p) {
      CHECK((expected.weights[p] == before.weights[p]) == (p % 3 == 0));
    }
    for (const Dialect dialect : kMixing) {
      CAPTURE(ranks);
      CAPTURE(std::string(NameOf(dialect)));
      Setup setup = TinySetup(dialect, ranks);
      freeze(setup);
      CheckEqual(Train(setup), expected);
    }
  }
}

TEST_CASE("Runtime: every optimizer, with replicas") {
  for (const OptimizerKind kind :
       {OptimizerKind::kSgd, OptimizerKind::kMomentum, OptimizerKind::kAdam, OptimizerKind::kAdamW,
        OptimizerKind::kAdadelta}) {
    Setup reference = TinySetup(Dialect::kDdp, 4);
    reference.job.optimizer.kind = kind;
    reference.training.optimizer = DefaultTrainingOptions(reference.job).optimizer;
    reference.training.optimizer.learning_rate = 0.02;
    // Adam divides by the size of a gradient, which may be that of its rounding error.
    reference.training.optimizer.epsilon = 0.1;
    const Outcome expected = Train(reference);
    const Weights oracle = TinyOracle(reference);
    for (const Dialect dialect : kAll) {
      CAPTURE(std::string(NameOf(dialect)));
      Setup setup = TinySetup(dialect, 4);
      setup.job = reference.job;
      setup.training = reference.training;
      CheckEqual(Train(setup), expected);
      setup.plan.shard_size = 2;
      setup.plan.replicate_size = 2;
      CheckClose(setup, oracle);
    }
  }
}

TEST_CASE("Runtime: clipping, replicas and accumulation") {
  Setup clipped = TinySetup(Dialect::kDdp, 4);
  clipped.job.clip_gradients = true;
  clipped.training.clip_norm = 0.1;
  clipped.job.optimizer.kind = OptimizerKind::kSgd;
  clipped.training.optimizer.learning_rate = 1.0;
  clipped.steps = 2;
  Setup unclipped = clipped;
  unclipped.job.clip_gradients = false;
  CHECK(RelativeDifference(Train(unclipped), Train(clipped)) > 0.01);
  const Weights whole = TinyOracle(clipped);
  for (const Dialect dialect : kAll) {
    CAPTURE(std::string(NameOf(dialect)));
    Setup setup = TinySetup(dialect, 4);
    setup.job = clipped.job;
    setup.training = clipped.training;
    setup.steps = clipped.steps;
    CheckClose(setup, whole);
    for (const SyncMode sync : {SyncMode::kEvery, SyncMode::kLast}) {
      if (sync == SyncMode::kLast && IsZero(dialect)) {
        continue;
      }
      setup.plan.shard_size = 2;
      setup.plan.accumulation = 2;
      setup.plan.sync = sync;
      CheckClose(setup, TinyOracle(setup));
    }
  }
}

// A scale of 2^26 makes fp16 gradients infinite: steps are skipped, the scale halves, until they
// fit; then training goes on as it would have without scaling.
TEST_CASE("Runtime: fp16 training scales its loss and skips steps that overflow") {
  for (const Dialect dialect : kAll) {
    CAPTURE(std::string(NameOf(dialect)));
    Setup setup = TinySetup(dialect, 2);
    setup.job.precision = {DType::kFp32, DType::kFp16, DType::kFp32};
    setup.job.clip_gradients = dialect != Dialect::kFsdp2 && dialect != Dialect::kZero2;  // or not
    setup.training.loss_scale.initial = 67108864.0;
    setup.training.loss_scale.growth_interval = 1000;
    setup.steps = 2;
    const Outcome skipped = Train(setup);
    CHECK(skipped.skipped_steps == 2);
    CHECK(skipped.scaler.scale == 16777216.0);
    setup.steps = 0;
    CHECK(Train(setup).weights == skipped.weights);
    setup.steps = 30;
    const Outcome trained = Train(setup);
    CHECK(trained.skipped_steps < 30);
    CHECK(trained.scaler.scale == std::ldexp(67108864.0, -static_cast<int>(trained.skipped_steps)));
    CHECK(trained.replicas_agree);
    CHECK(RelativeDifference(trained, skipped) > 0.01);
  }
}

// As in a loop of PyTorch: of 64 micro-batches each loss is a 64th, so larger scales fit than for
// one micro-batch. Without the division as many steps or more would be skipped.
TEST_CASE("Runtime: fp16 losses are divided by their number before they are scaled") {
  Setup setup = TinySetup(Dialect::kFsdp2, 2);
  setup.job.precision = {DType::kFp32, DType::kFp16, DType::kFp32};
  setup.training.loss_scale.initial = 67108864.0;
  setup.training.loss_scale.growth_interval = 1000;
  setup.steps = 30;
  setup.plan.accumulation = 1;
  const Outcome one = Train(setup);
  setup.plan.accumulation = 64;
  const Outcome many = Train(setup);
  CHECK(many.skipped_steps < one.skipped_steps);
}

}  // namespace shardwright::testing
