// Batch norm whose statistics are those of all ranks: however a batch is cut into ranks, training
// is that of one rank with the whole batch. Expected values come from such a run.

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "executor/host/kernels/table.h"
#include "models/loader.h"
#include "schedule/lower.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kWholeBatch = 12;

void HostKernel(const ModelOpCall& call, bool is_backward) {
  if (is_backward) {
    BackwardOnHost(call);
  } else {
    ForwardOnHost(call);
  }
}

// The first norm's input wants no gradient beyond the convolution's weight, the second one's does.
Model Net(bool is_synchronized) {
  const std::string norm =
      is_synchronized ? R"("op": "batch_norm", "synchronized": true)" : R"("op": "batch_norm")";
  const std::string text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"image": {"shape": [3, 6, 6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "norm0", "class": "SyncBatchNorm", "buffers": 7,
       "params": [{"name": "weight", "shape": [3]}, {"name": "bias", "shape": [3]}]},
      {"name": "conv1", "class": "Conv2d", "params": [{"name": "weight", "shape": [5, 3, 3, 3]}]},
      {"name": "norm1", "class": "SyncBatchNorm", "buffers": 11,
       "params": [{"name": "weight", "shape": [5]}, {"name": "bias", "shape": [5]}]},
      {"name": "conv2", "class": "Conv2d", "params": [{"name": "weight", "shape": [4, 5, 3, 3]}]},
      {"name": "norm2", "class": "SyncBatchNorm", "buffers": 9,
       "params": [{"name": "weight", "shape": [4]}, {"name": "bias", "shape": [4]}]},
      {"name": "fc", "class": "Linear",
       "params": [{"name": "weight", "shape": [7, 16]}, {"name": "bias", "shape": [7]}]}],
    "ops": [
      {)" + norm + R"(, "module": "norm0", "inputs": ["image"], "output": "x0"},
      {"op": "conv2d", "module": "conv1", "inputs": ["x0"], "output": "x1"},
      {)" + norm + R"(, "module": "norm1", "inputs": ["x1"], "output": "x2"},
      {"op": "activation", "function": "relu", "module": "norm1", "inputs": ["x2"], "output": "x3"},
      {"op": "conv2d", "module": "conv2", "inputs": ["x3"], "output": "x4"},
      {)" + norm + R"(, "module": "norm2", "inputs": ["x4"], "output": "x5"},
      {"op": "flatten", "inputs": ["x5"], "output": "x6"},
      {"op": "linear", "module": "fc", "inputs": ["x6"], "output": "x7"},
      {"op": "log_softmax", "inputs": ["x7"], "output": "x8"},
      {"op": "nll_loss", "inputs": ["x8", "label"], "output": "loss"}]})";
  return ModelFromJson(JsonValue::Parse(text, "net.json"), "net");
}

// Samples of different means, so that the ranks' statistics differ.
void FillImages(const BatchKey& key, std::span<const View> views) {
  const std::int64_t elements = views[0].elements / key.count;
  for (std::int64_t s = 0; s < key.count; ++s) {
    const std::int64_t sample = key.step * kWholeBatch * 2 + key.first_sample + s;
    std::mt19937_64 random(static_cast<std::uint64_t>(sample + 1));
    std::normal_distribution<float> normal(static_cast<float>(sample % 4), 1.0F);
    for (std::int64_t i = 0; i < elements; ++i) {
      static_cast<float*>(views[0].data)[s * elements + i] = normal(random);
    }
    static_cast<std::int64_t*>(views[1].data)[s] = sample % 7;
  }
}

Setup NetSetup(Dialect dialect, std::int64_t ranks, bool is_synchronized = true) {
  Setup s;
  s.model = Net(is_synchronized);
  s.kernel = HostKernel;
  s.run.inputs = FillImages;
  s.job.precision = {DType::kFp32, DType::kFp32, DType::kFp32};
  s.job.clip_gradients = false;
  s.job.optimizer.kind = OptimizerKind::kSgd;  // Adam makes updates of any rounding error
  s.training = DefaultTrainingOptions(s.job);
  s.training.optimizer.learning_rate = 0.02;
  s.plan.dialect = dialect;
  s.plan.micro_batch = kWholeBatch / ranks;
  (dialect == Dialect::kDdp ? s.plan.replicate_size : s.plan.shard_size) = ranks;
  if (IsZero(dialect)) {
    s.plan.zero.reduce_bucket = 100;
  }
  if (dialect == Dialect::kFairscale) {
    s.plan.reduce_scatter_bucket = Bytes(1000);
  }
  const std::string wrap = dialect == Dialect::kDdp ? "root" : "size:40";
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, dialect, "test");
  return s;
}

// An fp32 gradient here is a sum of at most 12 x 36 products, so two ways to sum it differ by 432
// roundings of 2^-24 of its terms' magnitudes at most; norms hand on relative errors, times their
// inverse deviations, which are about 1. Three steps of weights that change by less than their
// size: 3 x 432 x 2^-24.
constexpr double kBound = 3 * 432 * 0x1p-24;

double BufferDifference(const Outcome& x, const Outcome& y) {
  double difference = 0.0;
  for (const std::vector<float>& buffers : x.buffers) {
    REQUIRE(buffers.size() == y.buffers[0].size());
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      difference =
          std::max(difference, static_cast<double>(std::fabs(buffers[i] - y.buffers[0][i])));
    }
  }
  return difference;
}

void CheckLikeWhole(const Outcome& outcome, const Outcome& whole) {
  CHECK(outcome.findings == std::vector<std::string>{});
  CHECK(outcome.replicas_agree);
  CHECK(RelativeDifference(outcome, whole) < kBound);
  CHECK(BufferDifference(outcome, whole) < kBound * 4);  // means are up to 3, variances some 3
  REQUIRE(outcome.losses.size() == whole.losses.size());
  for (std::size_t i = 0; i < whole.losses.size(); ++i) {
    CHECK(std::abs(outcome.losses[i] - whole.losses[i]) < kBound * whole.losses[i]);
  }
}

}  // namespace

TEST_CASE("BatchNorm: ranks with common statistics train like one rank with the whole batch") {
  const Outcome whole = Train(NetSetup(Dialect::kDdp, 1));
  for (const Dialect dialect :
       {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative, Dialect::kFairscale,
        Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    for (const std::int64_t ranks : {2, 3}) {
      CAPTURE(std::string(NameOf(dialect)));
      CAPTURE(ranks);
      CheckLikeWhole(Train(NetSetup(dialect, ranks)), whole);
    }
    // What the bound is worth: with statistics of their own, ranks end up elsewhere.
    const Outcome apart = Train(NetSetup(dialect, 2, false));
    CHECK(RelativeDifference(apart, whole) > 50 * kBound);
    CHECK(BufferDifference(apart, whole) > 100 * kBound);
  }
}

TEST_CASE("BatchNorm: common statistics with replicas, accumulation and recomputation") {
  const auto accumulate = [](Setup s) {
    s.plan.accumulation = 2;
    return s;
  };
  const Outcome whole = Train(accumulate(NetSetup(Dialect::kDdp, 1)));
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    CAPTURE(std::string(NameOf(dialect)));
    Setup setup = accumulate(NetSetup(dialect, 4));
    setup.plan.shard_size = setup.plan.replicate_size = 2;
    CheckLikeWhole(Train(setup), whole);
  }
  // A norm that runs again exchanges again and, as in PyTorch, moves its running statistics twice.
  Setup again = NetSetup(Dialect::kFsdp2, 2);
  again.plan.recompute = {{.module = "norm1", .kind = RecomputeKind::kFull}};
  const Outcome outcome = Train(again);
  CHECK(outcome.findings == std::vector<std::string>{});
  CHECK(RelativeDifference(outcome, Train(NetSetup(Dialect::kDdp, 1))) < kBound);
}

// One gather of 2 C + 1 numbers per rank and norm in forward; in backward one sum of 2 C numbers
// where the input wants a gradient, which the first norm's does not. Where a dialect has a
// communicator of all ranks it serves, as PyTorch's default group does; native has one more.
TEST_CASE("BatchNorm: the exchanges of a program") {
  const auto exchanges = [](const Setup& setup) {
    const Program program = LowerSetup(setup);
    std::vector<std::string> found;
    for (std::size_t i = 0; i < program.step.size(); ++i) {
      const OpShape& shape = program.ShapeOf(program.step.ops[i]);
      if (InfoOf(shape.code).is_collective && shape.stream == Stream::kCompute) {
        found.push_back(std::string(InfoOf(shape.code).name) + " " +
                        std::to_string(shape.bytes.value) + " " +
                        program.groups[shape.group.value].name);
      }
    }
    return found;
  };
  using Names = std::vector<std::string>;
  CHECK(exchanges(NetSetup(Dialect::kFsdp2, 3)) ==
        Names{"all_gather 84 shard", "all_gather 132 shard", "all_gather 108 shard",
              "all_reduce 32 shard", "all_reduce 40 shard"});
  CHECK(exchanges(NetSetup(Dialect::kNative, 2)) ==
        Names{"all_gather 56 statistics", "all_gather 88 statistics", "all_gather 72 statistics",
              "all_reduce 32 statistics", "all_reduce 40 statistics"});
  Setup hybrid = NetSetup(Dialect::kFsdp1, 4);
  hybrid.plan.shard_size = hybrid.plan.replicate_size = 2;
  CHECK(exchanges(hybrid).at(0) == "all_gather 112 world");
  CHECK(exchanges(NetSetup(Dialect::kDdp, 1)).empty());
  CHECK(exchanges(NetSetup(Dialect::kFsdp2, 3, false)).empty());
  Setup forward = NetSetup(Dialect::kFsdp2, 3);
  forward.job.mode = JobMode::kForward;
  CHECK(exchanges(forward).empty());
}

}  // namespace shardwright::testing
