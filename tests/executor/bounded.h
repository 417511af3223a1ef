#pragma once

// Numbers of an fp64 oracle, each with a bound on how far an fp32 run may lie from it.
//
// A number is a pair (value, error): the value in fp64, and a bound on how far the executor's fp32
// number may lie from it. Errors propagate to all orders, |fl(a o b) - (a o b)| <= u |a o b| with
// u = 2^-24 is added per operation, and a sum of n terms adds gamma_(n-1) = (n - 1) u / (1 - (n -
// 1) u) times the sum of magnitudes, which holds for every order of summation (Higham, Accuracy and
// Stability of Numerical Algorithms, 2nd ed., section 4.2). So one oracle run bounds every way to
// cut the batch into ranks, micro-batches and replicas. What the ways differ in, beside the order,
// is how often a gradient is divided: by the rows of a micro-batch, before and behind the
// reductions, by the number of micro-batches; kDivisions counts the most. A number that is read in
// magnitude is read as |value| + error. The fp64 run's own rounding is 2^-29 of each bound.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright::testing {

inline constexpr double kUnit = 0x1p-24;
inline constexpr int kDivisions = 6;

inline double Gamma(double n) {
  return n * kUnit / (1 - n * kUnit);
}

struct Bounded {
  double value = 0.0;
  double error = 0.0;

  [[nodiscard]] double Magnitude() const { return std::abs(value) + error; }
};

inline Bounded Rounded(double value, double error, double roundings = 1) {
  return {value, error + Gamma(roundings) * (std::abs(value) + error)};
}

inline Bounded operator+(const Bounded& a, const Bounded& b) {
  return Rounded(a.value + b.value, a.error + b.error);
}

inline Bounded operator-(const Bounded& a, const Bounded& b) {
  return a + Bounded{-b.value, b.error};
}

inline Bounded operator*(const Bounded& a, const Bounded& b) {
  return Rounded(a.value * b.value,
                 std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error);
}

inline Bounded operator/(const Bounded& a, const Bounded& b) {
  const double value = a.value / b.value;
  const double least = std::abs(b.value) - b.error;
  const double error = (a.error + std::abs(value) * b.error) / least;
  return Rounded(value, least > 0.0 ? error : std::numeric_limits<double>::infinity());
}

inline Bounded Exp(const Bounded& a) {  // glibc's expf is within one unit in the last place
  const double value = std::exp(a.value);
  return Rounded(value, value * std::expm1(a.error), 2);
}

inline Bounded Log(const Bounded& a) {  // glibc's logf is within one unit in the last place
  return Rounded(std::log(a.value), -std::log1p(-a.error / a.value), 2);
}

inline Bounded Sqrt(const Bounded& a) {
  const double value = std::sqrt(a.value);
  return Rounded(value, std::max(value - std::sqrt(std::max(0.0, a.value - a.error)),
                                 std::sqrt(a.value + a.error) - value));
}

// Terms summed in any order, and in any grouping.
class Sum {
 public:
  void Add(const Bounded& term) {
    value_ += term.value;
    error_ += term.error;
    magnitude_ += term.Magnitude();
    ++count_;
  }
  // `more`: further roundings of partial sums.
  [[nodiscard]] Bounded Total(double more = 0.0) const {
    return {value_, error_ + Gamma(count_ + more) * magnitude_};
  }
  [[nodiscard]] double magnitude() const { return magnitude_; }

 private:
  double value_ = 0.0, error_ = 0.0, magnitude_ = 0.0;
  double count_ = 0.0;
};

using Vector = std::vector<Bounded>;
using Weights = std::vector<Vector>;  // by parameter

[[nodiscard]] inline Weights Exactly(const std::vector<std::vector<float>>& numbers) {
  Weights weights;
  for (const std::vector<float>& parameter : numbers) {
    weights.emplace_back();
    for (const float w : parameter) {
      weights.back().push_back({static_cast<double>(w), 0.0});
    }
  }
  return weights;
}

// d loss / d logits of the mean cross-entropy over `samples`, for one of them. The division is
// spread over micro-batches and ranks: `divisions` roundings.
[[nodiscard]] inline Vector MeanLossGradient(const Vector& logits, std::size_t label,
                                             double samples, double divisions) {
  double most = logits[0].value;
  for (const Bounded& logit : logits) {
    most = std::max(most, logit.value);
  }
  Sum powers;
  for (const Bounded& logit : logits) {
    powers.Add(Exp(logit - Bounded{most, 0.0}));
  }
  const Bounded log_sum = Log(powers.Total());
  Vector gradient;
  for (std::size_t k = 0; k < logits.size(); ++k) {
    const Bounded p = Exp((logits[k] - Bounded{most, 0.0}) - log_sum);
    const Bounded g = k == label ? p - Bounded{1.0, 0.0} : p;
    gradient.push_back(Rounded(g.value / samples, g.error / samples, divisions));
  }
  return gradient;
}

// torch.nn.utils.clip_grad_norm_ with the given norm.
inline void Clip(Weights& gradients, double most) {
  Sum squares;
  for (const Vector& parameter : gradients) {
    for (const Bounded& g : parameter) {
      squares.Add(g * g);
    }
  }
  const Bounded limit = Rounded(most, 0.0);
  const Bounded factor = limit / (Sqrt(squares.Total()) + Rounded(1e-6, 0.0));
  // min(1, x) moves no two numbers apart.
  const Bounded clipped = {std::min(1.0, factor.value), factor.error};
  for (Vector& parameter : gradients) {
    for (Bounded& g : parameter) {
      g = g * clipped;
    }
  }
}

// One step of gradient descent; `rate` is negative.
inline void Descend(Weights& weights, const Bounded& rate, const Weights& gradients) {
  for (std::size_t p = 0; p < weights.size(); ++p) {
    for (std::size_t i = 0; i < weights[p].size(); ++i) {
      weights[p][i] = weights[p][i] + rate * gradients[p][i];
    }
  }
}

struct BoundUse {
  double most = 0.0;     // the largest error over its bound
  double bound = 0.0;    // the largest bound
  double largest = 0.0;  // the largest number of the oracle
};

inline void Compare(const std::vector<float>& found, const Vector& exact, BoundUse& use) {
  REQUIRE(found.size() >= exact.size());
  for (std::size_t i = 0; i < exact.size(); ++i) {
    const double error = std::abs(static_cast<double>(found[i]) - exact[i].value);
    const double share = exact[i].error > 0.0 ? error / exact[i].error : error * 1e30;
    const bool is_number = std::isfinite(error) && std::isfinite(exact[i].error);
    use.most = std::max(use.most, is_number ? share : std::numeric_limits<double>::infinity());
    use.bound = std::max(use.bound, exact[i].error);
    use.largest = std::max(use.largest, std::abs(exact[i].value));
  }
}

[[nodiscard]] inline BoundUse CompareAll(const std::vector<std::vector<float>>& found,
                                         const Weights& exact) {
  BoundUse use;
  for (std::size_t p = 0; p < exact.size(); ++p) {
    Compare(found[p], exact[p], use);
  }
  return use;
}

}  // namespace shardwright::testing
