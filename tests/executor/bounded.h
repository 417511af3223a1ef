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
#include <vector>

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
  return Rounded(value, (a.error + std::abs(value) * b.error) / (std::abs(b.value) - b.error));
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
  return Rounded(value, value - std::sqrt(std::max(0.0, a.value - a.error)));
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

 private:
  double value_ = 0.0, error_ = 0.0, magnitude_ = 0.0;
  double count_ = 0.0;
};

using Vector = std::vector<Bounded>;
using Weights = std::vector<Vector>;  // by parameter

}  // namespace shardwright::testing
