#include "planner/maximize.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

// The least of planes; the slope is that of a plane that attains it.
struct Planes {
  std::vector<std::vector<double>> slopes;
  std::vector<double> heights;  // at 0

  [[nodiscard]] Slope operator()(const std::vector<double>& x) const {
    Slope least;
    for (std::size_t p = 0; p < slopes.size(); ++p) {
      double value = heights[p];
      for (std::size_t i = 0; i < x.size(); ++i) {
        value += slopes[p][i] * x[i];
      }
      if (p == 0 || value < least.value) {
        least = {value, slopes[p]};
      }
    }
    return least;
  }
};

TEST_CASE("Maximize: along a ridge that no single variable climbs") {
  // min(1 - x + 4 y, 1 + 4 x - y): along x = y it is 1 + 3 x, along one variable alone it falls.
  const Planes f = {{{-1, 4}, {4, -1}}, {1, 1}};
  const Maximum best = Maximize(f, {}, {0, 0}, 1e-6);
  CHECK(best.value == doctest::Approx(4));
  CHECK(best.at[0] == doctest::Approx(1));
  // Where both together are at most 1: 1 + 3 / 2.
  CHECK(Maximize(f, {{1, 1}}, {0, 0}, 1e-6).value == doctest::Approx(2.5));
}

TEST_CASE("Maximize: no point of a grid is better, limits hold") {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 20; ++round) {
    CAPTURE(round);
    Planes f;
    for (int p = 0; p < 12; ++p) {
      f.heights.push_back(uniform(random) + 0.5);
      f.slopes.push_back({uniform(random) - 0.5, uniform(random) - 0.5, 4 * uniform(random) - 2});
    }
    const std::vector<std::vector<double>> limits = {{uniform(random), uniform(random), 1}};
    const Maximum best = Maximize(f, limits, {0, 0, 0}, 1e-6);
    const auto used = [&](const std::vector<double>& x) {
      return limits[0][0] * x[0] + limits[0][1] * x[1] + limits[0][2] * x[2];
    };
    CHECK(used(best.at) <= 1 + 1e-9);
    CHECK(f(best.at).value == best.value);
    constexpr int kSteps = 20;
    for (int i = 0; i < (kSteps + 1) * (kSteps + 1) * (kSteps + 1); ++i) {
      const std::vector<double> x = {static_cast<double>(i % (kSteps + 1)) / kSteps,
                                     static_cast<double>(i / (kSteps + 1) % (kSteps + 1)) / kSteps,
                                     static_cast<double>(i / (kSteps + 1) / (kSteps + 1)) / kSteps};
      if (used(x) <= 1) {
        REQUIRE(f(x).value <= best.value + 1e-5);
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
