#include "tests/executor/tiny_oracle.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/error.h"
#include "executor/optimizer.h"
#include "tests/executor/tiny_training.h"

namespace shardwright::testing {
namespace {

// A type that numbers are kept in between two ops: relative and, below the normal numbers, absolute
// error of rounding to it. fp32 rounds in every operation already.
struct Format {
  double unit = 0.0;
  double tiny = 0.0;
};

Format FormatOf(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return {0x1p-8, 0.0};  // the exponents of fp32
    case DType::kFp16:
      return {0x1p-11, 0x1p-25};
    default:
      return {};
  }
}

// `unit_size`: what 1.0 in memory stands for.
Bounded Kept(const Bounded& b, const Format& format, double unit_size = 1.0) {
  return {b.value, b.error + format.unit * b.Magnitude() + format.tiny * unit_size};
}

Vector Kept(Vector numbers, const Format& format, double unit_size = 1.0) {
  for (Bounded& b : numbers) {
    b = Kept(b, format, unit_size);
  }
  return numbers;
}

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

// Gradient of one sample's cross-entropy; nothing divided yet. Logits that are off by at most d
// make numerator and denominator of a probability off by a factor of at most e^d each.
Vector LossGradient(const Vector& logits, std::size_t label) {
  double sum = 0.0, most = 0.0;
  for (const Bounded& logit : logits) {
    sum += std::exp(logit.value);
    most = std::max(most, logit.error);
  }
  Vector gradient;
  for (std::size_t k = 0; k < logits.size(); ++k) {
    const double value = std::exp(logits[k].value) / sum;
    // Two exponentials of two roundings each, the sum, the quotient.
    const Bounded p =
        Rounded(value, value * std::expm1(2 * most), 5 + static_cast<double>(logits.size() - 1));
    gradient.push_back(k == label ? p + Bounded{-1.0, 0.0} : p);
  }
  return gradient;
}

struct Network {
  const Model& model;
  Format format;                  // of weights as they are read, activations and gradients
  double gradient_unit_size = 1;  // of a gradient that is divided by nothing

  [[nodiscard]] std::size_t StorageOf(std::size_t p) const {
    const ParamId tied = model.params[p].tied_to;
    return tied.valid() ? tied.value : p;
  }
};

// Adds one sample's gradients. Parameters are weight and bias of layer after layer.
void AddGradients(const Network& network, const Weights& read, const Sample& sample,
                  std::vector<std::vector<Sum>>& sums) {
  const Format& format = network.format;
  std::vector<Vector> inputs = {Kept(sample.input, format)};
  for (std::size_t p = 0; p < read.size(); p += 2) {
    const Vector& weight = read[network.StorageOf(p)];
    const Vector& bias = read[network.StorageOf(p + 1)];
    inputs.push_back(Kept(Forward(weight, bias, inputs.back()), format));
  }
  Vector dy = LossGradient(inputs.back(), sample.label);
  for (std::size_t p = read.size(); p > 0; p -= 2) {
    dy = Kept(std::move(dy), format, network.gradient_unit_size);
    const Vector& x = inputs[p / 2 - 1];
    const std::size_t weight = network.StorageOf(p - 2), bias = network.StorageOf(p - 1);
    for (std::size_t o = 0; o < dy.size(); ++o) {
      for (std::size_t i = 0; i < x.size(); ++i) {
        sums[weight][o * x.size() + i].Add(dy[o] * x[i]);
      }
      sums[bias][o].Add(dy[o]);
    }
    dy = InputGradient(read[weight], dy, x.size());
  }
}

// Mean gradients over the samples, by parameter; none of frozen ones and of aliases. A gradient is
// kept once per division at most: as it is computed, before and behind each reduction.
Weights Gradients(const Network& network, const Weights& weights,
                  const std::vector<Sample>& samples) {
  Weights read;
  std::vector<std::vector<Sum>> sums;
  for (const Vector& parameter : weights) {
    read.push_back(Kept(parameter, network.format));
    sums.emplace_back(parameter.size());
  }
  for (const Sample& sample : samples) {
    AddGradients(network, read, sample, sums);
  }
  const auto count = static_cast<double>(samples.size());
  const double kept = kDivisions * network.format.unit;
  Weights gradients(weights.size());
  for (std::size_t p = 0; p < weights.size(); ++p) {
    for (const Sum& sum : sums[p]) {
      if (network.model.params[p].trainable) {
        Bounded total = sum.Total();
        total.error += kept * (1 + kept) * sum.magnitude() +
                       kDivisions * network.format.tiny * network.gradient_unit_size * count;
        gradients[p].push_back(Rounded(total.value / count, total.error / count, kDivisions));
      }
    }
  }
  return gradients;
}

// The formulas of torch.optim for one element. The executor's order of operations
// (executor/update_step.h) rounds no more often than these: it has fused multiply-adds where these
// round a product and a sum. lerp's (1 - beta1) (g - m) + m is written without m's second
// occurrence, so that m's error counts once; its rounding of g - m is within those of the two
// products here, since 1 - beta1 < beta1. A quotient takes numerator and denominator as
// independent, and is worth nothing where the denominator may be zero: then the bound is infinite,
// which the tests refuse.
class Optimizer {
 public:
  explicit Optimizer(const Setup& setup) : setup_(setup), o_(setup.training.optimizer) {}

  void Step(Weights& weights, const Weights& gradients) {
    ++step_;
    states_.resize(weights.size());
    for (std::size_t p = 0; p < weights.size(); ++p) {
      states_[p].resize(gradients[p].size());
      const bool decays = HasWeightDecay(setup_.model.params[p], o_);
      for (std::size_t i = 0; i < gradients[p].size(); ++i) {
        weights[p][i] =
            Element(weights[p][i], gradients[p][i], states_[p][i], decays ? o_.weight_decay : 0.0);
      }
    }
  }

 private:
  struct State {
    Bounded first, second;
  };

  [[nodiscard]] static Bounded Scalar(double value) { return Rounded(value, 0.0); }
  // x a + (1 - x) b
  [[nodiscard]] static Bounded Mixed(double x, const Bounded& a, const Bounded& b) {
    return Scalar(x) * a + Scalar(1.0 - x) * b;
  }

  [[nodiscard]] Bounded Element(const Bounded& weight, const Bounded& gradient, State& state,
                                double decay) const {
    const OptimizerKind kind = setup_.job.optimizer.kind;
    if (kind == OptimizerKind::kAdamW) {
      return Adam(weight * Scalar(1.0 - o_.learning_rate * decay), gradient, state);
    }
    const Bounded g = decay != 0.0 ? gradient + Scalar(decay) * weight : gradient;
    switch (kind) {
      case OptimizerKind::kMomentum:
        state.first =
            step_ == 1 ? g : Scalar(o_.momentum) * state.first + Scalar(1.0 - o_.dampening) * g;
        return weight - Scalar(o_.learning_rate) *
                            (o_.nesterov ? Scalar(o_.momentum) * state.first + g : state.first);
      case OptimizerKind::kAdam:
        return Adam(weight, g, state);
      case OptimizerKind::kAdadelta:
        return Adadelta(weight, g, state);
      default:
        return weight - Scalar(o_.learning_rate) * g;
    }
  }

  [[nodiscard]] Bounded Adam(const Bounded& weight, const Bounded& g, State& state) const {
    state.first = Mixed(o_.beta1, state.first, g);
    state.second = Mixed(o_.beta2, state.second, g * g);
    const double correction1 = 1.0 - std::pow(o_.beta1, step_);
    const double correction2 = 1.0 - std::pow(o_.beta2, step_);
    const Bounded root = Sqrt(state.second) / Scalar(std::sqrt(correction2));
    return weight -
           Scalar(o_.learning_rate / correction1) * state.first / (root + Scalar(o_.epsilon));
  }

  [[nodiscard]] Bounded Adadelta(const Bounded& weight, const Bounded& g, State& state) const {
    const Bounded epsilon = Scalar(o_.epsilon);
    state.first = Mixed(o_.rho, state.first, g * g);
    const Bounded delta = Sqrt(state.second + epsilon) / Sqrt(state.first + epsilon) * g;
    state.second = Mixed(o_.rho, state.second, delta * delta);
    return weight - Scalar(o_.learning_rate) * delta;
  }

  const Setup& setup_;
  const OptimizerOptions& o_;
  std::vector<std::vector<State>> states_;
  int step_ = 0;
};

}  // namespace

Weights TinyOracle(const Setup& setup) {
  SW_CHECK(setup.job.precision.param == setup.job.precision.reduce &&
               setup.training.schedule.kind == ScheduleKind::kConstant,
           "the oracle knows one type and one learning rate");
  Setup untrained = setup;
  untrained.steps = 0;
  Weights weights = Exactly(Train(untrained).weights);
  const Plan& plan = setup.plan;
  const std::int64_t batch =
      plan.shard_size * plan.replicate_size * plan.micro_batch * plan.accumulation;
  Network network{setup.model, FormatOf(setup.job.precision.param)};
  if (setup.job.precision.param == DType::kFp16) {
    // The loss is scaled, and divided by the batch at most before a gradient is kept.
    network.gradient_unit_size = static_cast<double>(batch) / setup.training.loss_scale.initial;
  }
  Optimizer optimizer(setup);
  for (std::int64_t step = 0; step < setup.steps; ++step) {
    Weights gradients = Gradients(network, weights, Batch(step, batch));
    if (setup.job.clip_gradients) {
      Clip(gradients, setup.training.clip_norm);
    }
    optimizer.Step(weights, gradients);
  }
  return weights;
}

}  // namespace shardwright::testing
