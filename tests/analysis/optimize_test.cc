#include "analysis/optimize.h"

#include <cmath>
#include <span>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright {
namespace {

TEST_CASE("Minimise finds the minimum of a valley, within the bounds") {
  // Rosenbrock's function, least at (1, 1); with x at most 0.5, at (0.5, 0.25).
  const auto valley = [](std::span<const double> v) {
    return 100 * std::pow(v[1] - v[0] * v[0], 2) + std::pow(1 - v[0], 2);
  };
  const FitResult free = Minimise(valley, {{"x", -2, 2, -1.2}, {"y", -2, 2, 1}}, 20000);
  CHECK(free.values[0] == doctest::Approx(1).epsilon(1e-3));
  CHECK(free.values[1] == doctest::Approx(1).epsilon(1e-3));
  const FitResult bounded = Minimise(valley, {{"x", -2, 0.5, -1.2}, {"y", -2, 2, 1}}, 20000);
  CHECK(bounded.values[0] == doctest::Approx(0.5).epsilon(1e-3));
  CHECK(bounded.values[1] == doctest::Approx(0.25).epsilon(1e-3));
  CHECK(bounded.objective == doctest::Approx(0.25).epsilon(1e-3));
}

TEST_CASE("Minimise passes on what the objective throws") {
  const auto broken = [](std::span<const double> v) -> double {
    if (v[0] > 0.5) {
      throw InputError("too far");
    }
    return -v[0];
  };
  CHECK_THROWS_AS((void)Minimise(broken, {{"x", 0, 1, 0.1}}, 1000), InputError);
}

}  // namespace
}  // namespace shardwright
