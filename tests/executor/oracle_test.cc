// Training in fp32 against fp64, within a bound that is computed beside the fp64 run (bounded.h).
// Parameters are weight and bias of layer after layer.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/wrap.h"
#include "tests/executor/bounded.h"
#include "tests/executor/harness.h"
#include "tests/executor/tiny_training.h"

namespace shardwright::testing {
namespace {

struct Sample {
  Vector input;
  std::size_t label = 0;
};

std::vector<Sample> Batch(std::int64_t step, std::int64_t count) {
  constexpr std::int64_t kIn = 6;  // of the tiny network
  std::vector<float> inputs(static_cast<std::size_t>(count * kIn));
  std::vector<std::int64_t> labels(static_cast<std::size_t>(count));
  const std::vector<View> views = {{inputs.data(), DType::kFp32, count * kIn},
                                   {labels.data(), DType::kInt64, count}};
  FillTinyBatch({step, 0, count}, views);
  std::vector<Sample> samples;
  for (std::size_t s = 0; s < labels.size(); ++s) {
    Sample sample;
    for (std::size_t i = 0; i < kIn; ++i) {
      sample.input.push_back({static_cast<double>(inputs[s * kIn + i]), 0.0});
    }
    sample.label = static_cast<std::size_t>(labels[s]);
    samples.push_back(sample);
  }
  return samples;
}

// y = W x + b for one sample; W is [out][in].
Vector Forward(const Vector& weight, const Vector& bias, const Vector& x) {
  Vector y;
  for (std::size_t o = 0; o < bias.size(); ++o) {
    Sum sum;
    sum.Add(bias[o]);
    for (std::size_t i = 0; i < x.size(); ++i) {
      sum.Add(weight[o * x.size() + i] * x[i]);
    }
    y.push_back(sum.Total());
  }
  return y;
}

Vector InputGradient(const Vector& weight, const Vector& dy, std::size_t in) {
  Vector dx;
  for (std::size_t i = 0; i < in; ++i) {
    Sum sum;
    for (std::size_t o = 0; o < dy.size(); ++o) {
      sum.Add(dy[o] * weight[o * in + i]);
    }
    dx.push_back(sum.Total());
  }
  return dx;
}

// Gradient of one sample's cross-entropy; nothing divided yet.
Vector LossGradient(const Vector& logits, std::size_t label) {
  Sum sum;
  Vector powers;
  for (const Bounded& logit : logits) {
    powers.push_back(Exp(logit));
    sum.Add(powers.back());
  }
  Vector gradient;
  for (std::size_t k = 0; k < logits.size(); ++k) {
    const Bounded p = powers[k] / sum.Total();
    gradient.push_back(k == label ? p + Bounded{-1.0, 0.0} : p);
  }
  return gradient;
}

// Mean gradients over the samples, by parameter.
Weights Gradients(const Weights& weights, const std::vector<Sample>& samples) {
  std::vector<std::vector<Sum>> sums;
  for (const Vector& parameter : weights) {
    sums.emplace_back(parameter.size());
  }
  for (const Sample& sample : samples) {
    std::vector<Vector> inputs = {sample.input};
    for (std::size_t p = 0; p < weights.size(); p += 2) {
      inputs.push_back(Forward(weights[p], weights[p + 1], inputs.back()));
    }
    Vector dy = LossGradient(inputs.back(), sample.label);
    for (std::size_t p = weights.size(); p > 0; p -= 2) {
      const Vector& x = inputs[p / 2 - 1];
      for (std::size_t o = 0; o < dy.size(); ++o) {
        for (std::size_t i = 0; i < x.size(); ++i) {
          sums[p - 2][o * x.size() + i].Add(dy[o] * x[i]);
        }
        sums[p - 1][o].Add(dy[o]);
      }
      dy = InputGradient(weights[p - 2], dy, x.size());
    }
  }
  Weights gradients;
  const auto count = static_cast<double>(samples.size());
  for (const std::vector<Sum>& of_parameter : sums) {
    gradients.emplace_back();
    for (const Sum& sum : of_parameter) {
      const Bounded total = sum.Total();
      gradients.back().push_back(Rounded(total.value / count, total.error / count, kDivisions));
    }
  }
  return gradients;
}

Weights Oracle(const Setup& setup, const std::vector<std::vector<float>>& first) {
  Weights weights = Exactly(first);
  const Plan& plan = setup.plan;
  const std::int64_t batch =
      plan.shard_size * plan.replicate_size * plan.micro_batch * plan.accumulation;
  const Bounded rate = Rounded(-setup.training.optimizer.learning_rate, 0.0);
  for (std::int64_t step = 0; step < setup.steps; ++step) {
    Weights gradients = Gradients(weights, Batch(step, batch));
    if (setup.job.clip_gradients) {
      Clip(gradients, setup.training.clip_norm);
    }
    Descend(weights, rate, gradients);
  }
  return weights;
}

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
  Setup untrained = SgdSetup(Dialect::kDdp, 1);
  untrained.steps = 0;
  const std::vector<std::vector<float>> first = Train(untrained).weights;
  BoundUse worst;
  for (const Cut& cut : Cuts()) {
    const Weights oracle = Oracle(SetupOf(cut, Dialect::kDdp, 1), first);
    for (const Dialect dialect :
         {Dialect::kDdp, Dialect::kNative, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kFairscale,
          Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
      const bool has_replicas = dialect != Dialect::kDdp && dialect != Dialect::kFairscale;
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
  Setup untrained = SgdSetup(Dialect::kDdp, 1);
  untrained.steps = 0;
  const std::vector<std::vector<float>> first = Train(untrained).weights;
  Setup setup = SgdSetup(Dialect::kFsdp2, 4);
  const Weights oracle = Oracle(setup, first);
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
