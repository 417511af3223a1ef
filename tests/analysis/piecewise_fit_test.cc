// Fits whose answer is known because the measurements are worked out from it.

#include "analysis/piecewise_fit.h"

#include <algorithm>
#include <span>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

TEST_CASE("A line is found through exact points, and a bad point does not move it") {
  // t = 3 x + 2.
  std::vector<FitRow> rows;
  for (int x = 1; x <= 9; ++x) {
    rows.push_back({{{0, static_cast<double>(x)}, {1, 1}}, 3.0 * x + 2, 1});
  }
  rows.push_back({{{0, 5.0}, {1, 1}}, 170, 1});  // ten times too long
  const std::vector<FitColumn> columns = {{1, 1, 0}, {1, 1, 0}};
  const std::vector<FittedValue> found =
      FitPiecewise(columns, [&](std::span<const double>) { return rows; });
  CHECK(found[0].value == doctest::Approx(3).epsilon(1e-3));
  CHECK(found[1].value == doctest::Approx(2).epsilon(1e-3));
  CHECK(found[0].is_found);
  CHECK(found[0].rows == 10);  // 3 x is 15 of the bad 170, which is noticeable, too
  CHECK(found[0].spread < 1e-3);
}

TEST_CASE("Values stay at their bounds, and unknown ones where they were") {
  // Falls with x: no slope of 0 or more does that, so the slope is 0.
  const std::vector<FitRow> rows = {{{{0, 1}, {1, 1}}, 3, 1}, {{{0, 2}, {1, 1}}, 2, 1}};
  const std::vector<FitColumn> columns = {{1, 1, 0}, {1, 1, 0}, {7, 1, 0}};
  const std::vector<FittedValue> found =
      FitPiecewise(columns, [&](std::span<const double>) { return rows; });
  CHECK(found[0].value == 0);
  CHECK(found[0].is_found);
  CHECK(found[1].value >= 2);
  CHECK(found[1].value <= 3);
  CHECK(found[2].value == 7);
  CHECK_FALSE(found[2].is_found);
}

// The larger of a x and b: which one counts is not known at the start.
TEST_CASE("The larger of two terms is told apart") {
  static constexpr double kSlope = 0.5;
  static constexpr double kFloor = 3;
  const auto rows_at = [](std::span<const double> values) {
    std::vector<FitRow> rows;
    for (int x = 1; x <= 20; ++x) {
      const bool is_slope = values[0] * x >= values[1];
      rows.push_back({{is_slope ? FitTerm{0, static_cast<double>(x)} : FitTerm{1, 1}},
                      std::max(kSlope * x, kFloor),
                      1});
    }
    return rows;
  };
  for (const double start : {0.1, 1.0, 10.0}) {
    CAPTURE(start);
    const std::vector<FitColumn> columns = {{start, 1, 0}, {1, 1, 0}};
    const std::vector<FittedValue> found = FitPiecewise(columns, rows_at);
    CHECK(found[0].value == doctest::Approx(kSlope).epsilon(1e-6));
    CHECK(found[1].value == doctest::Approx(kFloor).epsilon(1e-6));
  }
}

TEST_CASE("The middle of odd and even counts") {
  CHECK(MedianOf({5, 1, 3}) == 3);
  CHECK(MedianOf({4, 1, 3, 2}) == 2.5);
}

TEST_CASE("Where no value suits all rows, their sum is kept") {
  // Three ops of 1 s and two of 4 s, all of the same size: 11 s of five.
  const RowsAt rows_at = [](std::span<const double>) {
    return std::vector<FitRow>{{{{0, 1}}, 1, 3 * 1}, {{{0, 1}}, 4, 2 * 4}};
  };
  const std::vector<FitColumn> columns = {{2, 1, 0}};
  std::vector<FittedValue> found = FitPiecewise(columns, rows_at);
  KeepSums(columns, rows_at, found);
  CHECK(found[0].value == doctest::Approx(11.0 / 5));
  // What was not found stays.
  found[0] = {2, false, 0, 0};
  KeepSums(columns, rows_at, found);
  CHECK(found[0].value == 2);
}

}  // namespace
}  // namespace shardwright
