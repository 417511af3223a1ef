#include "planner/simplex.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

using Term = LinearProgram::Term;

constexpr std::size_t kColumns = 3;

// sum times * x <= limit
struct Plane {
  std::array<double, kColumns> times{};
  double limit = 0;

  [[nodiscard]] double ValueAt(const std::array<double, kColumns>& x) const {
    return times[0] * x[0] + times[1] * x[1] + times[2] * x[2];
  }
};

double Determinant(const std::array<std::array<double, kColumns>, kColumns>& m) {
  return m[0][0] * (m[1][1] * m[2][2] - m[1][2] * m[2][1]) -
         m[0][1] * (m[1][0] * m[2][2] - m[1][2] * m[2][0]) +
         m[0][2] * (m[1][0] * m[2][1] - m[1][1] * m[2][0]);
}

// The point where three planes meet (Cramer's rule); false: there is none.
bool Meet(const std::array<const Plane*, kColumns>& planes, std::array<double, kColumns>& x) {
  const std::array<std::array<double, kColumns>, kColumns> m = {planes[0]->times, planes[1]->times,
                                                                planes[2]->times};
  const double all = Determinant(m);
  for (std::size_t c = 0; c < kColumns; ++c) {
    auto with_limits = m;
    for (std::size_t r = 0; r < kColumns; ++r) {
      with_limits[r][c] = planes[r]->limit;
    }
    x[c] = Determinant(with_limits) / all;
  }
  return std::abs(all) > 1e-6;
}

// The largest value at a corner: where three planes meet and all others are kept.
double BestCorner(const std::vector<Plane>& planes, const std::array<double, kColumns>& worth) {
  const Plane objective = {worth, 0};
  double best = 0;  // at x = 0
  for (const Plane& a : planes) {
    for (const Plane& b : planes) {
      for (const Plane& c : planes) {
        std::array<double, kColumns> x{};
        if (&a < &b && &b < &c && Meet({&a, &b, &c}, x) &&
            std::all_of(
                planes.begin(), planes.end(),
                [&](const Plane& p) { return p.ValueAt(x) <= p.limit + 1e-7; })) {
          best = std::max(best, objective.ValueAt(x));
        }
      }
    }
  }
  return best;
}

}  // namespace

TEST_CASE("LinearProgram: a program that is solved by hand") {
  // max 3 x + 5 y  with  x <= 4, 2 y <= 12, 3 x + 2 y <= 18: 36 at (2, 6).
  LinearProgram lp;
  const std::size_t x = lp.AddColumn(3, 4);
  const std::size_t y = lp.AddColumn(5, 100);
  lp.AddRow(std::vector<Term>{{y, 2}}, 12);
  lp.AddRow(std::vector<Term>{{x, 3}, {y, 2}}, 18);
  CHECK(lp.Solve().value() == doctest::Approx(36));
  // Less x makes it worth 1 less each.
  lp.AddWorth(x, -2);
  CHECK(lp.Solve().value() == doctest::Approx(32));
  lp.AddWorth(x, -2);  // a cost
  CHECK(lp.Solve().value() == doctest::Approx(30));
}

TEST_CASE("LinearProgram: the best of all corners") {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    LinearProgram lp;
    std::vector<Plane> planes;
    std::array<double, kColumns> worth{};
    for (std::size_t c = 0; c < kColumns; ++c) {
      worth[c] = 2 * uniform(random) - 0.5;
      Plane most;
      most.times[c] = 1;
      most.limit = 1 + uniform(random);
      planes.push_back(most);
      Plane least;
      least.times[c] = -1;
      planes.push_back(least);
      CHECK(lp.AddColumn(worth[c], most.limit) == c);
    }
    for (int r = 0; r < 12; ++r) {
      Plane row;
      for (double& times : row.times) {
        times = 2 * uniform(random) - 0.7;
      }
      row.limit = uniform(random) < 0.3 ? 0 : uniform(random);
      planes.push_back(row);
      // Any column may be the first one.
      const auto first = static_cast<std::size_t>(r) % kColumns;
      std::vector<Term> terms;
      for (std::size_t c = 0; c < kColumns; ++c) {
        const std::size_t column = (first + c) % kColumns;
        terms.push_back({column, row.times[column]});
      }
      lp.AddRow(terms, row.limit);
    }
    CHECK(lp.Solve().value() == doctest::Approx(BestCorner(planes, worth)).epsilon(1e-6));
  }
}

TEST_CASE("LinearProgram: few of many rows bind") {
  // A circle, by 100,000 of its tangents: x + y is at most sqrt(2) there.
  constexpr int kTangents = 100'000;
  LinearProgram lp;
  const std::size_t x = lp.AddColumn(1, 2);
  const std::size_t y = lp.AddColumn(1, 2);
  for (int i = 0; i < kTangents; ++i) {
    const double angle = std::acos(0.0) * i / kTangents;
    lp.AddRow(std::vector<Term>{{x, std::cos(angle)}, {y, std::sin(angle)}}, 1);
  }
  CHECK(lp.Solve().value() == doctest::Approx(std::sqrt(2)).epsilon(1e-8));
}

}  // namespace shardwright
