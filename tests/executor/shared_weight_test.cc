// Layers that share a weight and have biases of their own, against fp64 within a bound that is
// computed beside the fp64 run (bounded.h).

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "core/json.h"
#include "models/loader.h"
#include "schedule/wrap.h"
#include "tests/executor/bounded.h"
#include "tests/executor/harness.h"

namespace shardwright::testing {
namespace {

constexpr std::size_t kBatch = 12, kSize = 6;
constexpr double kRate = 0.25;

// The first layer to run has no bias, so backward meets layers with more parameters before it.
Model Net() {
  return ModelFromJson(JsonValue::Parse(R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"features": {"shape": [6]}, "label": {"ids": 1}},
    "modules": [
      {"name": "first", "class": "Linear", "params": [{"name": "weight", "shape": [6, 6]}]},
      {"name": "second", "class": "Linear",
       "params": [{"name": "weight", "tied_to": "first.weight"}, {"name": "bias", "shape": [6]}]},
      {"name": "third", "class": "Linear",
       "params": [{"name": "weight", "tied_to": "first.weight"}, {"name": "bias", "shape": [6]}]}],
    "ops": [
      {"op": "linear", "module": "first", "inputs": ["features"], "output": "y1"},
      {"op": "linear", "module": "second", "inputs": ["y1"], "output": "y2"},
      {"op": "linear", "module": "third", "inputs": ["y2"], "output": "y3"},
      {"op": "cross_entropy", "inputs": ["y3", "label"], "output": "loss"}]})",
                                        "net.json"),
                       "net");
}

void FillRows(const BatchKey& key, std::span<const View> views) {
  for (std::int64_t s = 0; s < key.count; ++s) {
    const std::int64_t sample = key.first_sample + s;
    std::mt19937_64 random(static_cast<std::uint64_t>(sample + 1));
    std::normal_distribution<float> normal(0.0F, 1.0F);
    for (std::size_t i = 0; i < kSize; ++i) {
      static_cast<float*>(views[0].data)[static_cast<std::size_t>(s) * kSize + i] = normal(random);
    }
    static_cast<std::int64_t*>(views[1].data)[s] = sample % std::int64_t{kSize};
  }
}

Setup NetSetup(Dialect dialect, std::int64_t ranks, std::int64_t accumulation, SyncMode sync) {
  Setup s = DescentSetup(Net(), kRate);
  s.run.inputs = FillRows;
  s.steps = 1;
  s.plan.dialect = dialect;
  s.plan.micro_batch = std::int64_t{kBatch} / ranks / accumulation;
  s.plan.accumulation = accumulation;
  s.plan.sync = sync;
  (dialect == Dialect::kDdp ? s.plan.replicate_size : s.plan.shard_size) = ranks;
  if (IsZero(dialect)) {
    s.plan.zero.reduce_bucket = 100;
  }
  s.plan.units = Wrap(s.model, ParseWrap("root", "test"), {}, dialect, "test");
  return s;
}

// Backward of y = W x + b, given dy: adds to dW and db, returns dx.
Vector LinearBackward(const Vector& w, const Vector& x, const Vector& dy, std::vector<Sum>& dw,
                      std::vector<Sum>* db) {
  std::vector<Sum> dx(kSize);
  for (std::size_t o = 0; o < kSize; ++o) {
    for (std::size_t i = 0; i < kSize; ++i) {
      dw[o * kSize + i].Add(dy[o] * x[i]);
      dx[i].Add(dy[o] * w[o * kSize + i]);
    }
    if (db != nullptr) {
      (*db)[o].Add(dy[o]);
    }
  }
  Vector totals;
  for (const Sum& sum : dx) {
    totals.push_back(sum.Total());
  }
  return totals;
}

Vector LinearForward(const Vector& w, const Vector* bias, const Vector& x) {
  Vector y;
  for (std::size_t o = 0; o < kSize; ++o) {
    Sum sum;
    for (std::size_t i = 0; i < kSize; ++i) {
      sum.Add(w[o * kSize + i] * x[i]);
    }
    if (bias != nullptr) {
      sum.Add((*bias)[o]);
    }
    y.push_back(sum.Total());
  }
  return y;
}

// One step from `weights`: first.weight, (its alias), second.bias, (its alias), third.bias.
Weights OracleOf(Weights weights) {
  const Vector w = weights[0];
  const Vector second_bias = weights[2], third_bias = weights[4];
  std::vector<float> rows(kBatch * kSize);
  std::vector<std::int64_t> labels(kBatch);
  const std::vector<View> views = {{rows.data(), DType::kFp32, std::ssize(rows)},
                                   {labels.data(), DType::kInt64, std::ssize(labels)}};
  FillRows({0, 0, std::int64_t{kBatch}}, views);
  std::vector<Sum> dw(kSize * kSize), second(kSize), third(kSize);
  for (std::size_t s = 0; s < kBatch; ++s) {
    Vector x;
    for (std::size_t i = 0; i < kSize; ++i) {
      x.push_back({static_cast<double>(rows[s * kSize + i]), 0.0});
    }
    const Vector y1 = LinearForward(w, nullptr, x);
    const Vector y2 = LinearForward(w, &second_bias, y1);
    const Vector y3 = LinearForward(w, &third_bias, y2);
    const Vector d3 = MeanLossGradient(y3, static_cast<std::size_t>(labels[s]), kBatch, kDivisions);
    const Vector d2 = LinearBackward(w, y2, d3, dw, &third);
    const Vector d1 = LinearBackward(w, y1, d2, dw, &second);
    (void)LinearBackward(w, x, d1, dw, nullptr);
  }
  const auto descend = [](Vector& weight, const std::vector<Sum>& gradient) {
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      weight[i] = weight[i] + Bounded{-kRate, 0.0} * gradient[i].Total(kDivisions);
    }
  };
  descend(weights[0], dw);
  descend(weights[2], second);
  descend(weights[4], third);
  return weights;
}

}  // namespace

TEST_CASE("Shared weight: layers with biases of their own train as in fp64") {
  Setup untrained = NetSetup(Dialect::kDdp, 1, 1, SyncMode::kEvery);
  untrained.steps = 0;
  const Weights start = Exactly(Train(untrained).weights);
  const Weights oracle = OracleOf(start);
  CHECK(oracle[2][0].value != start[2][0].value);
  for (const Dialect dialect : {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    for (const std::int64_t ranks : {1, 2}) {
      for (const std::int64_t accumulation : {1, 2}) {
        for (const SyncMode sync : {SyncMode::kEvery, SyncMode::kLast}) {
          if (sync == SyncMode::kLast && (IsZero(dialect) || accumulation == 1)) {
            continue;
          }
          CAPTURE(std::string(NameOf(dialect)));
          CAPTURE(ranks);
          CAPTURE(accumulation);
          const BoundUse use =
              CompareAll(Train(NetSetup(dialect, ranks, accumulation, sync)).weights, oracle);
          CHECK(use.most <= 1.0);
          CHECK(use.bound < 1e-4);
        }
      }
    }
  }
}

// FSDP1 computes gradients of frozen weights beside trainable parameters, and adds them up.
TEST_CASE("Shared weight: frozen, it stays as it was, and the biases train as in fp64") {
  Setup untrained = NetSetup(Dialect::kDdp, 1, 1, SyncMode::kEvery);
  untrained.steps = 0;
  const Weights start = Exactly(Train(untrained).weights);
  Weights oracle = OracleOf(start);
  oracle[0] = start[0];
  for (const Dialect dialect : {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                Dialect::kZero1, Dialect::kZero3}) {
    for (const std::size_t bias : {0, 2, 4}) {  // frozen, too; 0: none
      CAPTURE(std::string(NameOf(dialect)));
      CAPTURE(bias);
      Setup setup = NetSetup(dialect, 2, 2, SyncMode::kEvery);
      for (const std::size_t weight : {std::size_t{0}, std::size_t{1}, std::size_t{3}, bias}) {
        setup.model.params[weight].trainable = false;
      }
      Weights expected = oracle;
      expected[bias] = start[bias];
      const BoundUse use = CompareAll(Train(setup).weights, expected);
      CHECK(use.most <= 1.0);
    }
  }
}

}  // namespace shardwright::testing
