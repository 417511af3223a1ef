// Batch norm over the micro-batches of all ranks, in fp32, against fp64 within a bound that is
// computed beside the fp64 run (bounded.h). The oracle sees the whole batch, in plain loops.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
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

constexpr std::size_t kBatch = 12, kIn = 2, kSide = 4, kKernel = 3, kOut = 3, kClasses = 4;
constexpr std::size_t kSideOut = kSide - kKernel + 1, kPlane = kSideOut * kSideOut;
constexpr std::size_t kFeatures = kOut * kPlane;
constexpr double kEpsilon = 1e-5, kMomentum = 0.1;

Model Net(bool is_synchronized) {
  const std::string text = R"({
    "format": "shardwright-model", "version": 1, "class": "Net",
    "inputs": {"image": {"shape": [2, 4, 4]}, "label": {"ids": 1}},
    "modules": [
      {"name": "conv", "class": "Conv2d", "params": [{"name": "weight", "shape": [3, 2, 3, 3]}]},
      {"name": "norm", "class": "SyncBatchNorm", "buffers": 7,
       "params": [{"name": "weight", "shape": [3]}, {"name": "bias", "shape": [3]}]},
      {"name": "fc", "class": "Linear",
       "params": [{"name": "weight", "shape": [4, 12]}, {"name": "bias", "shape": [4]}]}],
    "ops": [
      {"op": "conv2d", "module": "conv", "inputs": ["image"], "output": "x0"},
      {"op": "batch_norm", "module": "norm", "inputs": ["x0"], "output": "x1"%s},
      {"op": "activation", "function": "relu", "inputs": ["x1"], "output": "x2"},
      {"op": "flatten", "inputs": ["x2"], "output": "x3"},
      {"op": "linear", "module": "fc", "inputs": ["x3"], "output": "x4"},
      {"op": "log_softmax", "inputs": ["x4"], "output": "x5"},
      {"op": "nll_loss", "inputs": ["x5", "label"], "output": "loss"}]})";
  const std::size_t mark = text.find("%s");
  return ModelFromJson(
      JsonValue::Parse(text.substr(0, mark) + (is_synchronized ? R"(, "synchronized": true)" : "") +
                           text.substr(mark + 2),
                       "net.json"),
      "net");
}

// Samples of different means, so that the ranks' statistics differ.
void FillImages(const BatchKey& key, std::span<const View> views) {
  const std::int64_t elements = views[0].elements / key.count;
  for (std::int64_t s = 0; s < key.count; ++s) {
    const std::int64_t sample = key.step * std::int64_t{kBatch} + key.first_sample + s;
    std::mt19937_64 random(static_cast<std::uint64_t>(sample + 1));
    std::normal_distribution<float> normal(static_cast<float>(sample % 5) - 2.0F, 1.0F);
    for (std::int64_t i = 0; i < elements; ++i) {
      static_cast<float*>(views[0].data)[s * elements + i] = normal(random);
    }
    static_cast<std::int64_t*>(views[1].data)[s] = sample % std::int64_t{kClasses};
  }
}

struct Images {
  std::vector<Vector> pixels;  // by sample
  std::vector<std::size_t> labels;
};

// Samples [first, first + count) of a step.
Images BatchOf(std::int64_t step, std::size_t first, std::size_t count) {
  constexpr std::size_t kPixels = kIn * kSide * kSide;
  std::vector<float> pixels(count * kPixels);
  std::vector<std::int64_t> labels(count);
  const std::vector<View> views = {
      {pixels.data(), DType::kFp32, std::ssize(pixels)},
      {labels.data(), DType::kInt64, std::ssize(labels)},
  };
  const auto signed_first = static_cast<std::int64_t>(first);
  FillImages({step, signed_first, static_cast<std::int64_t>(count)}, views);
  Images images;
  for (std::size_t s = 0; s < count; ++s) {
    images.pixels.emplace_back();
    for (std::size_t i = 0; i < kPixels; ++i) {
      images.pixels.back().push_back({static_cast<double>(pixels[s * kPixels + i]), 0.0});
    }
    images.labels.push_back(static_cast<std::size_t>(labels[s]));
  }
  return images;
}

// Calls f(weight, pixel, output) for every product of a convolution.
template <class F>
void ForEachTap(const F& f) {
  for (std::size_t o = 0; o < kOut; ++o) {
    for (std::size_t p = 0; p < kPlane; ++p) {
      for (std::size_t i = 0; i < kIn; ++i) {
        for (std::size_t k = 0; k < kKernel * kKernel; ++k) {
          const std::size_t y = p / kSideOut + k / kKernel, x = p % kSideOut + k % kKernel;
          f((o * kIn + i) * kKernel * kKernel + k, (i * kSide + y) * kSide + x, o * kPlane + p);
        }
      }
    }
  }
}

Vector Totals(const std::vector<Sum>& sums, double more = 0.0) {
  Vector totals;
  for (const Sum& sum : sums) {
    totals.push_back(sum.Total(more));
  }
  return totals;
}

struct Statistics {
  Bounded mean, squares, inverse;
};

// Of channel `c` of x over a micro-batch of all ranks. A rank's mean, which the squares of that
// rank are taken around, is off by no more than gamma times the channel's largest element; the
// executor joins the ranks' numbers in fp64, which adds the rounding of each to fp32.
Statistics StatisticsOf(const std::vector<Vector>& x, std::size_t c) {
  const auto count = static_cast<double>(x.size() * kPlane);
  double mean = 0.0, largest = 0.0, error = 0.0;
  for (const Vector& sample : x) {
    for (std::size_t p = 0; p < kPlane; ++p) {
      const Bounded& e = sample[c * kPlane + p];
      mean += e.value / count;
      largest = std::max(largest, e.Magnitude());
      error = std::max(error, e.error);
    }
  }
  Statistics s;
  s.mean = {mean, error + Gamma(count + 3) * largest};
  Sum squares;
  for (const Vector& sample : x) {
    for (std::size_t p = 0; p < kPlane; ++p) {
      const Bounded distance = sample[c * kPlane + p] - s.mean;
      squares.Add(distance * distance);
    }
  }
  s.squares = squares.Total(3);
  const Bounded variance = s.squares / Bounded{count, 0.0} + Rounded(kEpsilon, 0.0);
  s.inverse = Bounded{1.0, 0.0} / Sqrt(variance);
  return s;
}

struct State {
  Weights weights;  // conv, norm's weight and bias, fc's weight and bias
  Vector running;   // means, then variances
};

// One micro-batch of all ranks: moves the running statistics.
class MicroBatch {
 public:
  MicroBatch(State& state, const Images& images) : state_(state), images_(images) {}

  // Of the mean loss over a step's samples.
  [[nodiscard]] Weights Gradients() {
    Convolve();
    Normalize();
    Classify();
    NormalizeBackward();
    return gradients_;
  }

 private:
  void Convolve() {
    for (const Vector& pixels : images_.pixels) {
      std::vector<Sum> sums(kFeatures);
      ForEachTap([&](std::size_t w, std::size_t in, std::size_t out) {
        sums[out].Add(state_.weights[0][w] * pixels[in]);
      });
      x_.push_back(Totals(sums));
    }
  }

  void Normalize() {
    const auto count = static_cast<double>(images_.labels.size() * kPlane);
    for (std::size_t c = 0; c < kOut; ++c) {
      statistics_.push_back(StatisticsOf(x_, c));
      const Statistics& s = statistics_.back();
      const auto move = [](Bounded& running, const Bounded& now) {
        running = running + Rounded(kMomentum, 0.0) * (now - running);
      };
      move(state_.running[c], s.mean);
      move(state_.running[kOut + c], s.squares / Bounded{count - 1, 0.0});
    }
    for (const Vector& x : x_) {
      y_.emplace_back();
      for (std::size_t f = 0; f < kFeatures; ++f) {
        const std::size_t c = f / kPlane;
        const Statistics& s = statistics_[c];
        y_.back().push_back((x[f] - s.mean) * (s.inverse * state_.weights[1][c]) +
                            state_.weights[2][c]);
      }
    }
  }

  // From the norm's outputs to their gradients, with those of the linear layer on the way.
  void Classify() {
    const Vector& weight = state_.weights[3];
    std::vector<Sum> weight_sums(weight.size()), bias_sums(kClasses);
    for (std::size_t s = 0; s < images_.labels.size(); ++s) {
      Vector z;
      for (const Bounded& y : y_[s]) {  // relu moves no two numbers apart
        z.push_back({std::max(0.0, y.value), y.error});
      }
      std::vector<Sum> logits(kClasses);
      for (std::size_t k = 0; k < kClasses; ++k) {
        logits[k].Add(state_.weights[4][k]);
        for (std::size_t f = 0; f < kFeatures; ++f) {
          logits[k].Add(weight[k * kFeatures + f] * z[f]);
        }
      }
      const Vector d = MeanLossGradient(Totals(logits), images_.labels[s], kBatch, kDivisions);
      std::vector<Sum> dz(kFeatures);
      for (std::size_t k = 0; k < kClasses; ++k) {
        bias_sums[k].Add(d[k]);
        for (std::size_t f = 0; f < kFeatures; ++f) {
          weight_sums[k * kFeatures + f].Add(d[k] * z[f]);
          dz[f].Add(d[k] * weight[k * kFeatures + f]);
        }
      }
      dy_.push_back(Totals(dz));
      for (std::size_t f = 0; f < kFeatures; ++f) {
        Bounded& g = dy_.back()[f];
        const Bounded& y = y_[s][f];
        if (std::abs(y.value) <= y.error) {  // either side of the kink
          g = {g.value * (y.value > 0.0 ? 1.0 : 0.0), g.Magnitude()};
        } else if (y.value < 0.0) {
          g = {};
        }
      }
    }
    gradients_[3] = Totals(weight_sums, kDivisions);
    gradients_[4] = Totals(bias_sums, kDivisions);
  }

  // With xhat = (x - mean) inverse: dx = weight inverse (dy - mean(dy) - xhat mean(dy xhat)).
  void NormalizeBackward() {
    const std::size_t samples = images_.labels.size();
    const Bounded count = {static_cast<double>(samples * kPlane), 0.0};
    std::vector<Vector> xhat(samples, Vector(kFeatures));
    std::vector<Sum> products(kOut), sums(kOut);
    for (std::size_t s = 0; s < samples; ++s) {
      for (std::size_t f = 0; f < kFeatures; ++f) {
        const Statistics& of = statistics_[f / kPlane];
        xhat[s][f] = (x_[s][f] - of.mean) * of.inverse;
        products[f / kPlane].Add(dy_[s][f] * xhat[s][f]);
        sums[f / kPlane].Add(dy_[s][f]);
      }
    }
    // Ranks round what they exchange, and what comes out of it.
    gradients_[1] = Totals(products, kDivisions);
    gradients_[2] = Totals(sums, kDivisions);
    std::vector<Sum> conv(state_.weights[0].size());
    for (std::size_t s = 0; s < samples; ++s) {
      Vector dx;
      for (std::size_t f = 0; f < kFeatures; ++f) {
        const std::size_t c = f / kPlane;
        const Bounded factor = state_.weights[1][c] * statistics_[c].inverse;
        const Bounded mean_product = products[c].Total(kDivisions) / count;
        const Bounded mean_dy = sums[c].Total(kDivisions) / count;
        dx.push_back((factor * dy_[s][f] - factor * mean_product * xhat[s][f]) - factor * mean_dy);
      }
      ForEachTap([&](std::size_t w, std::size_t in, std::size_t out) {
        conv[w].Add(images_.pixels[s][in] * dx[out]);
      });
    }
    gradients_[0] = Totals(conv, kDivisions);
  }

  State& state_;
  const Images& images_;
  std::vector<Vector> x_, y_, dy_;  // by sample: into and out of the norm, and its gradient
  std::vector<Statistics> statistics_;
  Weights gradients_ = Weights(5);
};

constexpr double kRate = 0.05;

Setup NetSetup(Dialect dialect, std::int64_t ranks, bool is_synchronized = true) {
  Setup s = DescentSetup(Net(is_synchronized), kRate);
  s.run.inputs = FillImages;
  s.steps = 2;
  s.plan.dialect = dialect;
  s.plan.micro_batch = std::int64_t{kBatch} / ranks;
  (dialect == Dialect::kDdp ? s.plan.replicate_size : s.plan.shard_size) = ranks;
  if (IsZero(dialect)) {
    s.plan.zero.reduce_bucket = 100;
  }
  const std::string wrap = dialect == Dialect::kDdp ? "root" : "size:20";
  s.plan.units = Wrap(s.model, ParseWrap(wrap, "test"), {}, dialect, "test");
  return s;
}

State OracleOf(const Setup& setup) {
  Setup untrained = setup;
  untrained.steps = 0;
  State state;
  state.weights = Exactly(Train(untrained).weights);
  state.running.assign(kOut, {});
  state.running.resize(2 * kOut, {1.0, 0.0});
  const auto accumulation = static_cast<std::size_t>(setup.plan.accumulation);
  for (std::int64_t step = 0; step < setup.steps; ++step) {
    Weights gradients = state.weights;
    for (std::size_t m = 0; m < accumulation; ++m) {
      const std::size_t count = kBatch / accumulation;
      const Images images = BatchOf(step, m * count, count);
      const Weights fresh = MicroBatch(state, images).Gradients();
      for (std::size_t p = 0; p < fresh.size(); ++p) {
        for (std::size_t i = 0; i < fresh[p].size(); ++i) {
          gradients[p][i] = m == 0 ? fresh[p][i] : gradients[p][i] + fresh[p][i];
        }
      }
    }
    for (std::size_t p = 0; p < gradients.size(); ++p) {
      if (!setup.model.params[p].trainable) {
        gradients[p].assign(gradients[p].size(), {});
      }
    }
    Descend(state.weights, Rounded(-kRate, 0.0), gradients);
  }
  return state;
}

BoundUse CompareAll(const Outcome& outcome, const State& oracle) {
  BoundUse use = testing::CompareAll(outcome.weights, oracle.weights);
  for (const std::vector<float>& buffers : outcome.buffers) {
    Compare(buffers, oracle.running, use);
  }
  return use;
}

}  // namespace

TEST_CASE("BatchNorm: common statistics lie within the derived bound of fp64") {
  const State oracle = OracleOf(NetSetup(Dialect::kDdp, 1));
  BoundUse worst;
  const auto check = [&](const Setup& setup) {
    const Outcome outcome = Train(setup);
    CHECK(outcome.findings == std::vector<std::string>{});
    CHECK(outcome.replicas_agree);
    const BoundUse use = CompareAll(outcome, oracle);
    CAPTURE(std::string(NameOf(setup.plan.dialect)));
    CAPTURE(setup.plan.shard_size);
    CAPTURE(setup.plan.replicate_size);
    CHECK(use.most <= 1.0);
    worst.most = std::max(worst.most, use.most);
    worst.bound = std::max(worst.bound, use.bound);
  };
  for (const Dialect dialect : {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                Dialect::kZero1, Dialect::kZero2, Dialect::kZero3}) {
    for (const std::int64_t ranks : {1, 2, 3, 4}) {
      check(NetSetup(dialect, ranks));
    }
  }
  for (const Dialect dialect : {Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative}) {
    Setup hybrid = NetSetup(dialect, 4);
    hybrid.plan.shard_size = hybrid.plan.replicate_size = 2;
    check(hybrid);
  }
  MESSAGE("at most " << worst.most << " of the bound, which is at most " << worst.bound);
  // What the bound is worth: statistics of each rank's own lie far outside.
  CHECK(CompareAll(Train(NetSetup(Dialect::kFsdp2, 2, false)), oracle).most > 10.0);
  CHECK(worst.bound < 1e-2);
  CHECK(worst.most > 1e-4);
}

// Each micro-batch has statistics of its own. A norm whose input wants no gradient exchanges
// nothing in backward. One that runs again exchanges again and, as in PyTorch, moves its running
// statistics twice, so that these are not compared.
TEST_CASE("BatchNorm: accumulation, recomputation and a frozen layer lie within the bound, too") {
  const auto accumulate = [](Setup& s) {
    s.plan.accumulation = 2;
    s.plan.micro_batch /= 2;
  };
  const auto freeze = [](Setup& s) { s.model.params[0].trainable = false; };
  const auto rerun = [](Setup& s) {
    s.plan.recompute = {{.module = "norm", .kind = RecomputeKind::kFull}};
  };
  using Change = std::function<void(Setup&)>;
  for (const Change& change : {Change(accumulate), Change(freeze), Change(rerun)}) {
    Setup alone = NetSetup(Dialect::kDdp, 1);
    change(alone);
    const State oracle = OracleOf(alone);
    for (const Dialect dialect : {Dialect::kDdp, Dialect::kFsdp2, Dialect::kFsdp1, Dialect::kNative,
                                  Dialect::kZero1, Dialect::kZero3}) {
      Setup setup = NetSetup(dialect, 2);
      change(setup);
      CAPTURE(std::string(NameOf(dialect)));
      const Outcome outcome = Train(setup);
      CHECK(outcome.findings == std::vector<std::string>{});
      const BoundUse use = setup.plan.recompute.empty()
                               ? CompareAll(outcome, oracle)
                               : testing::CompareAll(outcome.weights, oracle.weights);
      CHECK(use.most <= 1.0);
      CHECK(use.bound < 1e-2);
    }
  }
}

}  // namespace shardwright::testing
