#pragma once

// Fits the numbers of a price formula that is a sum of terms, some of which are the larger of two:
// linear in the numbers once it is known which of the two counts.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace shardwright {

// One number that is looked for.
struct FitColumn {
  double start = 0;
  double scale = 1;  // > 0: the size of usual values; where nothing speaks, `start` is kept
  double lower = 0;
  bool is_fixed = false;  // it stays at its start and is never found
};

struct FitTerm {
  std::size_t column = 0;
  double factor = 0;
};

// One measurement: the sum of factor * value over its terms should be `measured`.
struct FitRow {
  std::vector<FitTerm> terms;
  double measured = 0;  // > 0
  double weight = 1;    // how much its relative error counts
};

struct FittedValue {
  double value = 0;
  bool is_found = false;  // false: no measurement depends on it noticeably; the value is the start
  // Median absolute relative error of the measurements that depend on it.
  double spread = 0;
  std::int64_t rows = 0;  // how many those are
};

// Rows with the terms that count at these values.
using RowsAt = std::function<std::vector<FitRow>(std::span<const double> values)>;

// Least absolute relative errors, by least squares that are weighted again and again;
// deterministic. O(rounds * (rows * terms^2 + columns^3)).
[[nodiscard]] std::vector<FittedValue> FitPiecewise(std::span<const FitColumn> columns,
                                                    const RowsAt& rows_at);

// Moves values that were found so that measurements add up: those of which one column's terms are
// most. The fit is right for the middle op; where one number stands for ops that are unlike (a pool
// and an activation), none suits all, but a step is their sum. A measurement counts weight /
// measured times. No value moves by more than a factor of 3.
void KeepSums(std::span<const FitColumn> columns, const RowsAt& rows_at,
              std::span<FittedValue> found);

// The middle one of `values`; of an even number the mean of both. Requires at least one.
[[nodiscard]] double MedianOf(std::vector<double> values);

}  // namespace shardwright
