// Batch norms that mixed precision leaves alone: their parameters, gradients and reductions stay in
// fp32 while the rest of the network computes in bf16 or fp16.

#include <cmath>
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "executor/half.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {
namespace {

constexpr std::int64_t kBatch = 12;
constexpr double kRate = 0.125;  // a power of two: dividing by it is exact

Model Net() {
  return ModelFromJson(JsonValue::Parse(R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"image": {"shape": [2, 6, 6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "conv1", "class": "Conv2d", "params": [{"name": "weight", "shape": [3, 2, 3, 3]}]},
      {"name": "norm1", "class": "BatchNorm2d", "buffers": 7, "full_precision": true,
       "params": [{"name": "weight", "shape": [3]}, {"name": "bias", "shape": [3]}]},
      {"name": "conv2", "class": "Conv2d", "params": [{"name": "weight", "shape": [5, 3, 3, 3]}]},
      {"name": "norm2", "class": "BatchNorm2d", "buffers": 11, "full_precision": true,
       "params": [{"name": "weight", "shape": [5]}, {"name": "bias", "shape": [5]}]},
      {"name": "fc", "class": "Linear",
       "params": [{"name": "weight", "shape": [4, 20]}, {"name": "bias", "shape": [4]}]}],
    "ops": [
      {"op": "conv2d", "module": "conv1", "inputs": ["image"], "output": "x0"},
      {"op": "batch_norm", "module": "norm1", "inputs": ["x0"], "output": "x1"},
      {"op": "activation", "function": "relu", "inputs": ["x1"], "output": "x2"},
      {"op": "conv2d", "module": "conv2", "inputs": ["x2"], "output": "x3"},
      {"op": "batch_norm", "module": "norm2", "inputs": ["x3"], "output": "x4"},
      {"op": "flatten", "inputs": ["x4"], "output": "x5"},
      {"op": "linear", "module": "fc", "inputs": ["x5"], "output": "x6"},
      {"op": "log_softmax", "inputs": ["x6"], "output": "x7"},
      {"op": "nll_loss", "inputs": ["x7", "label"], "output": "loss"}]})",
                                        "net.json"),
                       "net");
}

void FillImages(const BatchKey& key, std::span<const View> views) {
  const std::int64_t elements = views[0].elements / key.count;
  for (std::int64_t s = 0; s < key.count; ++s) {
    const std::int64_t sample = key.step * kBatch + key.first_sample + s;
    std::mt19937_64 random(static_cast<std::uint64_t>(sample + 1));
    std::normal_distribution<float> normal(static_cast<float>(sample % 5) - 2.0F, 1.0F);
    for (std::int64_t i = 0; i < elements; ++i) {
      StoreFloat(views[0].dtype, views[0].data, s * elements + i, normal(random));
    }
    static_cast<std::int64_t*>(views[1].data)[s] = sample % 4;
  }
}

Setup NetSetup(Dialect dialect, std::int64_t ranks, DType compute = DType::kBf16) {
  Setup s = DescentSetup(Net(), kRate);
  s.run.inputs = FillImages;
  s.job.precision.param = compute;
  s.plan.dialect = dialect;
  s.plan.micro_batch = kBatch / ranks;
  (dialect == Dialect::kDdp ? s.plan.replicate_size : s.plan.shard_size) = ranks;
  const std::string wrap = dialect == Dialect::kDdp ? "root" : "module";
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, dialect, "test");
  KeepFullPrecision(s.model, s.job.precision, s.plan);
  return s;
}

void CheckEqual(const Setup& setup, const Outcome& expected) {
  CAPTURE(std::string(NameOf(setup.plan.dialect)));
  CAPTURE(setup.plan.shard_size);
  const Outcome outcome = Train(setup);
  CHECK(outcome.findings == std::vector<std::string>{});
  CHECK(outcome.replicas_agree);
  CHECK(outcome.weights == expected.weights);
  CHECK(outcome.buffers == expected.buffers);
  CHECK(outcome.losses == expected.losses);
}

float InBf16(float value) {
  return Bf16ToFloat(FloatToBf16(value));
}

}  // namespace

// DDP has no units: there autocast leaves the norms' parameters alone where they are used.
TEST_CASE("Full precision: every dialect trains norms as data parallel does, bit for bit") {
  for (const DType compute : {DType::kBf16, DType::kFp16}) {
    for (const std::int64_t ranks : {1, 2, 3, 4}) {
      const Outcome expected = Train(NetSetup(Dialect::kDdp, ranks, compute));
      for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1}) {
        CheckEqual(NetSetup(dialect, ranks, compute), expected);
      }
    }
  }
}

TEST_CASE("Full precision: units, order, recomputation and offload change no bit") {
  const std::vector<std::function<void(Setup&)>> changes = {
      [](Setup& s) {
        s.plan.units = Wrap(s.model, ParseWrap("root", "t"), {}, s.plan.dialect, "t");
      },
      [](Setup& s) { s.plan.units.front().reshard = Reshard(); },
      [](Setup& s) {
        for (UnitPlan& unit : s.plan.units) {
          unit.reshard = {Reshard::Kind::kToGroup, 2};
        }
      },
      // Norms that run again would move their running statistics again, as PyTorch's do.
      [](Setup& s) {
        s.plan.recompute = {{"conv1"}, {"conv2"}};
      },
      [](Setup& s) { s.plan.offload.parameters = true; },
      [](Setup& s) { s.plan.offload.activations = true; },
  };
  for (const Dialect dialect : {Dialect::kNative, Dialect::kFsdp2}) {
    Setup unsharded = NetSetup(dialect, 4);
    std::swap(unsharded.plan.shard_size, unsharded.plan.replicate_size);
    const Outcome expected = Train(unsharded);
    CheckEqual(NetSetup(dialect, 4), expected);
    for (const auto& change : changes) {
      Setup setup = NetSetup(dialect, 4);
      change(setup);
      KeepFullPrecision(setup.model, setup.job.precision, setup.plan);
      CheckEqual(setup, expected);
    }
  }
}

// Biases begin at zero, so that one step of gradient descent with a power of two as rate shows
// their gradients exactly. All weights of norms begin at 1, which is a bf16 number: the first
// forward, and all other gradients, are the same either way.
TEST_CASE("Full precision: without it gradients are those in full precision, rounded to bf16") {
  Setup kept = NetSetup(Dialect::kFsdp2, 1);
  kept.steps = 1;
  Setup cast = kept;
  for (UnitPlan& unit : cast.plan.units) {
    unit.full_precision = false;
  }
  const Outcome fine = Train(kept), coarse = Train(cast);
  int differing = 0;
  for (std::size_t p = 0; p < kept.model.params.size(); ++p) {
    const Parameter& param = kept.model.params[p];
    CAPTURE(param.fqn);
    if (!param.full_precision) {
      CHECK(fine.weights[p] == coarse.weights[p]);
    } else if (param.fqn.ends_with("bias")) {
      for (std::size_t i = 0; i < fine.weights[p].size(); ++i) {
        const float gradient = fine.weights[p][i] / static_cast<float>(-kRate);
        CHECK(coarse.weights[p][i] / static_cast<float>(-kRate) == InBf16(gradient));
        differing += gradient == InBf16(gradient) ? 0 : 1;
      }
    }
  }
  CHECK(differing > 4);  // of 8
}

// fp16 sums are divided by ops of their own, which the sums of the norms' units do without: these
// are means of NCCL's.
TEST_CASE("Full precision: gradients of norms are means, also beside sums in fp16") {
  for (const std::int64_t ranks : {2, 3}) {
    Setup wide = NetSetup(Dialect::kFsdp2, ranks, DType::kFp16);
    wide.steps = 1;
    Setup narrow = wide;
    narrow.job.precision.reduce = DType::kFp16;
    const Outcome expected = Train(wide), outcome = Train(narrow);
    int norms = 0;
    for (std::size_t p = 0; p < wide.model.params.size(); ++p) {
      if (wide.model.params[p].full_precision) {
        CAPTURE(wide.model.params[p].fqn);
        CHECK(outcome.weights[p] == expected.weights[p]);
        ++norms;
      }
    }
    CHECK(norms == 4);
  }
}

}  // namespace shardwright::testing
