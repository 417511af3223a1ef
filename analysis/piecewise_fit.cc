#include "analysis/piecewise_fit.h"

#include <cmath>
#include <limits>

#include "core/error.h"
#include "core/ranges.h"

namespace shardwright {
namespace {

constexpr int kMostRounds = 60;
// Below this, errors count by their squares: otherwise one exact row would outweigh all others.
constexpr double kSmallError = 1e-3;
// How firmly values that no row speaks about stay at their start.
constexpr double kTether = 1e-10;
// A row depends on a number that makes up this part of it.
constexpr double kNoticeableChange = 0.05;

double Predict(const FitRow& row, std::span<const double> values) {
  const double sum = Summed<double>(
      row.terms, [&](const FitTerm& term) { return term.factor * values[term.column]; });
  return sum;
}

double RelativeError(const FitRow& row, std::span<const double> values) {
  return Predict(row, values) / row.measured - 1;
}

double WeightedError(std::span<const FitRow> rows, std::span<const double> values) {
  const double sum = Summed<double>(
      rows, [&](const FitRow& row) { return row.weight * std::abs(RelativeError(row, values)); });
  return sum;
}

// Symmetric, positive definite, small.
struct NormalEquations {
  std::size_t size = 0;
  std::vector<double> matrix;  // row-major
  std::vector<double> right;

  double& At(std::size_t row, std::size_t column) { return matrix[row * size + column]; }
};

// Of the values in units of their scales.
NormalEquations SetUp(std::span<const FitColumn> columns, std::span<const FitRow> rows,
                      std::span<const double> values) {
  NormalEquations e;
  e.size = columns.size();
  e.matrix.assign(e.size * e.size, 0);
  e.right.assign(e.size, 0);
  for (const FitRow& row : rows) {
    const double error = std::max(std::abs(RelativeError(row, values)), kSmallError);
    const double weight = row.weight / error;
    for (const FitTerm& a : row.terms) {
      const double x = a.factor * columns[a.column].scale / row.measured;
      e.right[a.column] += weight * x;
      for (const FitTerm& b : row.terms) {
        e.At(a.column, b.column) += weight * x * b.factor * columns[b.column].scale / row.measured;
      }
    }
  }
  double largest = 0;
  for (std::size_t i = 0; i < e.size; ++i) {
    largest = std::max(largest, e.At(i, i));
  }
  const double tether = largest > 0 ? kTether * largest : 1;
  for (std::size_t i = 0; i < e.size; ++i) {
    e.At(i, i) += tether;
    e.right[i] += tether * columns[i].start / columns[i].scale;
  }
  return e;
}

// Solves for the values that are not fixed, by Gaussian elimination. The others stay.
void Solve(NormalEquations e, const std::vector<bool>& fixed, std::vector<double>& x) {
  for (std::size_t i = 0; i < e.size; ++i) {
    if (!fixed[i]) {
      continue;
    }
    for (std::size_t j = 0; j < e.size; ++j) {
      if (j != i) {
        e.right[j] -= e.At(j, i) * x[i];
        e.At(j, i) = e.At(i, j) = 0;
      }
    }
    e.At(i, i) = 1;
    e.right[i] = x[i];
  }
  // No pivots needed: the matrix is positive definite.
  for (std::size_t i = 0; i < e.size; ++i) {
    for (std::size_t row = i + 1; row < e.size; ++row) {
      const double factor = e.At(row, i) / e.At(i, i);
      for (std::size_t column = i; factor != 0 && column < e.size; ++column) {
        e.At(row, column) -= factor * e.At(i, column);
      }
      e.right[row] -= factor * e.right[i];
    }
  }
  for (std::size_t i = e.size; i-- > 0;) {
    double sum = e.right[i];
    for (std::size_t column = i + 1; column < e.size; ++column) {
      sum -= e.At(i, column) * x[column];
    }
    x[i] = sum / e.At(i, i);
  }
}

// The least squares with every value at its lower bound or above: those that fall below are fixed
// at the bound, the furthest one first.
std::vector<double> SolveBounded(std::span<const FitColumn> columns, const NormalEquations& e) {
  std::vector<bool> fixed;
  std::vector<double> x;
  for (const FitColumn& column : columns) {
    fixed.push_back(column.is_fixed);
    x.push_back(column.start / column.scale);
  }
  for (std::size_t round = 0; round <= columns.size(); ++round) {
    Solve(e, fixed, x);
    double furthest = 0;
    std::size_t worst = columns.size();
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const double below = columns[i].lower / columns[i].scale - x[i];
      if (!fixed[i] && below > furthest) {
        furthest = below;
        worst = i;
      }
    }
    if (worst == columns.size()) {
      break;
    }
    fixed[worst] = true;
    x[worst] = columns[worst].lower / columns[worst].scale;
  }
  for (std::size_t i = 0; i < columns.size(); ++i) {
    x[i] *= columns[i].scale;
  }
  return x;
}

std::vector<FittedValue> Describe(std::span<const FitColumn> columns, std::span<const FitRow> rows,
                                  std::span<const double> values) {
  std::vector<std::vector<double>> errors(columns.size());
  for (const FitRow& row : rows) {
    std::vector<double> share(columns.size(), 0);
    for (const FitTerm& term : row.terms) {
      share[term.column] += term.factor * values[term.column] / row.measured;
    }
    for (std::size_t i = 0; i < columns.size(); ++i) {
      if (share[i] >= kNoticeableChange) {
        errors[i].push_back(std::abs(RelativeError(row, values)));
      }
    }
  }
  std::vector<FittedValue> result(columns.size());
  for (std::size_t i = 0; i < columns.size(); ++i) {
    // A cost that turned out to be nothing is a finding, too, if rows could have had it.
    const bool has_terms = AnyOf(rows, [&](const FitRow& row) {
      return std::any_of(row.terms.begin(), row.terms.end(), [&](const FitTerm& term) {
        return term.column == i &&
               term.factor * columns[i].scale / row.measured >= kNoticeableChange;
      });
    });
    const bool is_nothing = values[i] <= columns[i].lower && has_terms;
    result[i].is_found = !columns[i].is_fixed && (!errors[i].empty() || is_nothing);
    result[i].value = result[i].is_found ? values[i] : columns[i].start;
    result[i].rows = std::ssize(errors[i]);
    result[i].spread = errors[i].empty() ? 0 : MedianOf(errors[i]);
  }
  return result;
}

}  // namespace

double MedianOf(std::vector<double> values) {
  SW_CHECK(!values.empty(), "the median of nothing");
  SortAll(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::vector<FittedValue> FitPiecewise(std::span<const FitColumn> columns, const RowsAt& rows_at) {
  std::vector<double> values = Mapped<double>(columns, &FitColumn::start);
  std::vector<double> best = values;
  double least = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kMostRounds; ++round) {
    const std::vector<FitRow> rows = rows_at(values);
    const double objective = WeightedError(rows, values);
    if (objective < least) {
      least = objective;
      best = values;
    }
    const std::vector<double> next = SolveBounded(columns, SetUp(columns, rows, values));
    if (next == values) {
      break;
    }
    values = next;
  }
  return Describe(columns, rows_at(best), best);
}

namespace {

// The time of the measurements that are mostly column `i`, and what the columns say of them.
struct ColumnSums {
  double measured = 0, predicted = 0, own = 0;
};
ColumnSums SumsOf(std::size_t i, std::span<const FitRow> rows, std::span<const double> values) {
  ColumnSums sums;
  for (const FitRow& row : rows) {
    double all = 0, own = 0;
    for (const FitTerm& term : row.terms) {
      const double part = term.factor * values[term.column];
      all += part;
      own += term.column == i ? part : 0;
    }
    if (own > all / 2) {
      const double count = row.weight / row.measured;
      sums.measured += count * row.measured;
      sums.predicted += count * all;
      sums.own += count * own;
    }
  }
  return sums;
}

}  // namespace

void KeepSums(std::span<const FitColumn> columns, const RowsAt& rows_at,
              std::span<FittedValue> found) {
  constexpr int kRounds = 3;  // columns stand beside each other in some rows
  constexpr double kMost = 3;
  std::vector<double> values = Mapped<double>(found, &FittedValue::value);
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < columns.size(); ++i) {
      const ColumnSums sums = SumsOf(i, rows_at(values), values);
      if (!found[i].is_found || sums.own <= 0) {
        continue;
      }
      const double moved = values[i] * (1 + (sums.measured - sums.predicted) / sums.own);
      values[i] = std::clamp(moved, found[i].value / kMost, found[i].value * kMost);
      values[i] = std::max(values[i], columns[i].lower);
    }
  }
  for (std::size_t i = 0; i < columns.size(); ++i) {
    found[i].value = values[i];
  }
}

}  // namespace shardwright
