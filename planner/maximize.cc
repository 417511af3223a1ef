#include "planner/maximize.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>

namespace shardwright {
namespace {

constexpr std::size_t kNoPlace = static_cast<std::size_t>(-1);

// max c x  with  A x <= b, x >= 0, where b >= 0: the simplex method on a dense tableau. One row per
// inequality, one column per variable, then b; the last row is the objective.
class Tableau {
 public:
  Tableau(std::size_t rows, std::size_t columns)
      : rows_(rows), columns_(columns), cells_((rows + 1) * (columns + 1)) {
    for (std::size_t c = 0; c < columns; ++c) {
      column_of_.push_back(c);
    }
    for (std::size_t r = 0; r < rows; ++r) {
      row_of_.push_back(columns + r);
    }
  }

  double& At(std::size_t row, std::size_t column) { return cells_[row * (columns_ + 1) + column]; }

  // The objective's coefficients are those of -c.
  std::vector<double> Solve() {
    const std::size_t most = 20 * (rows_ + columns_);
    for (std::size_t i = 0; i < most; ++i) {
      // The steepest column; after a while the first, which never comes back to where it was.
      const std::size_t column = Entering(i > most / 2);
      const std::size_t row = column == kNoPlace ? kNoPlace : Leaving(column);
      if (row == kNoPlace) {
        break;
      }
      Pivot(row, column);
    }
    std::vector<double> x(columns_, 0);
    for (std::size_t r = 0; r < rows_; ++r) {
      if (row_of_[r] < columns_) {
        x[row_of_[r]] = At(r, columns_);
      }
    }
    return x;
  }

 private:
  static constexpr double kTiny = 1e-11;

  std::size_t Entering(bool first) {
    std::size_t best = kNoPlace;
    for (std::size_t c = 0; c < columns_; ++c) {
      const double cost = At(rows_, c);
      if (cost >= -kTiny) {
        continue;
      }
      const bool better =
          best == kNoPlace || (first ? column_of_[c] < column_of_[best] : cost < At(rows_, best));
      best = better ? c : best;
    }
    return best;
  }

  std::size_t Leaving(std::size_t column) {
    std::size_t best = kNoPlace;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < rows_; ++r) {
      if (At(r, column) <= kTiny) {
        continue;
      }
      const double ratio = At(r, columns_) / At(r, column);
      if (ratio < least || (ratio == least && row_of_[r] < row_of_[best])) {
        least = ratio;
        best = r;
      }
    }
    return best;
  }

  void Pivot(std::size_t row, std::size_t column) {
    const double pivot = At(row, column);
    for (std::size_t c = 0; c <= columns_; ++c) {
      At(row, c) /= pivot;
    }
    At(row, column) = 1 / pivot;
    for (std::size_t r = 0; r <= rows_; ++r) {
      const double factor = At(r, column);
      if (r == row || factor == 0) {
        continue;
      }
      for (std::size_t c = 0; c <= columns_; ++c) {
        At(r, c) -= factor * At(row, c);
      }
      At(r, column) = -factor * At(row, column);
    }
    std::swap(row_of_[row], column_of_[column]);
  }

  std::size_t rows_, columns_;
  std::vector<double> cells_;
  std::vector<std::size_t> row_of_, column_of_;  // the variable that each stands for
};

struct Cut {
  std::vector<double> at;
  Slope slope;

  [[nodiscard]] double ValueAt(const std::vector<double>& x) const {
    double value = slope.value;
    for (std::size_t i = 0; i < x.size(); ++i) {
      value += slope.slope[i] * (x[i] - at[i]);
    }
    return value;
  }
};

// The highest point under all cuts in the box of half-width `radius` around `center`.
std::pair<double, std::vector<double>> HighestUnder(const std::vector<Cut>& cuts,
                                                    const std::vector<std::vector<double>>& limits,
                                                    const std::vector<double>& center,
                                                    double radius) {
  const std::size_t n = center.size();
  std::vector<double> low(n);
  for (std::size_t i = 0; i < n; ++i) {
    low[i] = std::max(0.0, center[i] - radius);
  }
  double base = std::numeric_limits<double>::infinity();  // the least cut at `low`
  for (const Cut& cut : cuts) {
    base = std::min(base, cut.ValueAt(low));
  }
  // Variables: x - low, then the height above `base`.
  Tableau t(n + limits.size() + cuts.size(), n + 1);
  std::size_t row = 0;
  for (std::size_t i = 0; i < n; ++i, ++row) {
    t.At(row, i) = 1;
    t.At(row, n + 1) = std::min(1.0, center[i] + radius) - low[i];
  }
  for (const std::vector<double>& limit : limits) {
    double left = 1;
    for (std::size_t i = 0; i < n; ++i) {
      t.At(row, i) = limit[i];
      left -= limit[i] * low[i];
    }
    t.At(row++, n + 1) = std::max(0.0, left);
  }
  for (const Cut& cut : cuts) {
    for (std::size_t i = 0; i < n; ++i) {
      t.At(row, i) = -cut.slope.slope[i];
    }
    t.At(row, n) = 1;
    t.At(row++, n + 1) = cut.ValueAt(low) - base;
  }
  t.At(row, n) = -1;
  std::vector<double> x = t.Solve();
  const double height = base + x[n];
  x.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    x[i] += low[i];
  }
  return {height, std::move(x)};
}

}  // namespace

Maximum Maximize(const std::function<Slope(const std::vector<double>&)>& f,
                 const std::vector<std::vector<double>>& limits, std::vector<double> start,
                 double tolerance) {
  constexpr int kMostEvaluations = 80;
  constexpr double kFirstRadius = 0.5;
  Slope slope = f(start);
  Maximum best = {slope.value, start};
  std::vector<Cut> cuts;
  cuts.push_back({std::move(start), std::move(slope)});
  double radius = kFirstRadius;
  for (int i = 0; i < kMostEvaluations; ++i) {
    auto [height, x] = HighestUnder(cuts, limits, best.at, radius);
    const double hope = height - best.value;
    // Concave: outside of the box it rises no faster than to its edge.
    if (hope <= tolerance * std::abs(best.value) * std::min(1.0, radius)) {
      break;
    }
    slope = f(x);
    const double gain = slope.value - best.value;
    if (gain > 0) {
      best = {slope.value, x};
    }
    radius = gain > hope / 2 ? std::min(1.0, radius * 2) : gain <= 0 ? radius / 2 : radius;
    cuts.push_back({std::move(x), std::move(slope)});
  }
  return best;
}

}  // namespace shardwright
