// A small solver for the linear programs of the bound: the dual simplex method with rows added
// lazily.
//
// Example: max 3 x + 2 y with x, y <= 4 and x + y <= 5. The start has both columns at their bounds:
// x = y = 4, worth 20. The row is broken by 3. It is added, one pivot takes y down to 1, and the
// result is 14.
//
// Few of some thousands of rows bind. So each round adds, for each first column, the row that the
// current point breaks most, and goes on from the last optimum. A round costs O(rows + pivots *
// columns^2); at most 100 rounds.

#include "planner/simplex.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace shardwright {
namespace {

constexpr double kTiny = 1e-9;

// The dual simplex method on a dense tableau, which goes on from the last optimum when rows come.
// Variables: the columns, then the slack of each bound, then that of each row.
class Tableau {
 public:
  Tableau(const std::vector<double>& worth, const std::vector<double>& most)
      : columns_(worth.size()), variables_(2 * columns_) {
    objective_.cells.assign(columns_ + 1, 0);
    for (std::size_t c = 0; c < columns_; ++c) {
      // Columns worth something begin at their bound, the others at 0.
      const bool is_full = worth[c] > 0;
      others_.push_back(is_full ? columns_ + c : c);
      Row row = {is_full ? c : columns_ + c, std::vector<double>(columns_ + 1, 0)};
      row.cells[c] = 1;
      row.cells[columns_] = most[c];
      rows_.push_back(std::move(row));
      objective_.cells[c] = std::abs(worth[c]);
      objective_.cells[columns_] += is_full ? worth[c] * most[c] : 0;
    }
  }

  void Add(std::span<const LinearProgram::Term> terms, double limit) {
    std::vector<double> times(columns_, 0);
    for (const LinearProgram::Term& term : terms) {
      times[term.column] = term.times;
    }
    Row added = {variables_++, std::vector<double>(columns_ + 1, 0)};
    added.cells[columns_] = limit;
    for (std::size_t c = 0; c < columns_; ++c) {
      added.cells[c] = others_[c] < columns_ ? times[others_[c]] : 0;
    }
    for (const Row& row : rows_) {
      Subtract(row.variable < columns_ ? times[row.variable] : 0, row, added);
    }
    rows_.push_back(std::move(added));
  }

  // False: it did not end.
  bool Solve() {
    const std::size_t most = 20 * (rows_.size() + columns_);
    for (std::size_t i = 0; i < most; ++i) {
      const auto leaving = std::min_element(
          rows_.begin(), rows_.end(),
          [](const Row& a, const Row& b) { return a.cells.back() < b.cells.back(); });
      if (leaving->cells.back() >= -kTiny) {
        // Rows that do not bind would only be carried along.
        std::erase_if(rows_, [&](const Row& row) { return row.variable >= 2 * columns_; });
        return true;
      }
      const std::size_t entering = Entering(*leaving);
      if (entering == columns_) {
        return false;
      }
      Pivot(*leaving, entering);
    }
    return false;
  }

  [[nodiscard]] double value() const { return objective_.cells[columns_]; }
  [[nodiscard]] std::vector<double> Point() const {
    std::vector<double> x(columns_, 0);
    for (const Row& row : rows_) {
      if (row.variable < columns_) {
        x[row.variable] = row.cells[columns_];
      }
    }
    return x;
  }

 private:
  struct Row {
    std::size_t variable = 0;
    std::vector<double> cells;  // variable = last cell - sum of cells * others
  };

  // The first whose worth would fall below 0 as the row's variable rises to 0.
  [[nodiscard]] std::size_t Entering(const Row& row) const {
    std::size_t entering = columns_;
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t c = 0; c < columns_; ++c) {
      const double ratio = row.cells[c] < -kTiny ? -objective_.cells[c] / row.cells[c] : least;
      if (ratio < least) {
        least = ratio;
        entering = c;
      }
    }
    return entering;
  }

  void Pivot(Row& row, std::size_t column) {
    const double pivot = std::exchange(row.cells[column], 1);
    for (double& cell : row.cells) {
      cell /= pivot;
    }
    for (Row& other : rows_) {
      if (&other != &row) {
        Subtract(std::exchange(other.cells[column], 0), row, other);
      }
    }
    Subtract(std::exchange(objective_.cells[column], 0), row, objective_);
    std::swap(row.variable, others_[column]);
  }

  void Subtract(double times, const Row& row, Row& from) const {
    for (std::size_t c = 0; times != 0 && c <= columns_; ++c) {
      from.cells[c] -= times * row.cells[c];
    }
  }

  std::size_t columns_, variables_;
  std::vector<std::size_t> others_;  // by column: the variable that is 0
  std::vector<Row> rows_;
  Row objective_;
};

}  // namespace

std::size_t LinearProgram::AddColumn(double worth, double most) {
  worth_.push_back(worth);
  most_.push_back(most);
  return worth_.size() - 1;
}

void LinearProgram::AddRow(std::span<const Term> terms, double limit) {
  rows_.push_back({terms_.size(), terms_.size() + terms.size(), limit});
  terms_.insert(terms_.end(), terms.begin(), terms.end());
}

// Rows that the optimum of the others breaks are added until there is none: of those with the same
// first column the one that it breaks most.
std::optional<double> LinearProgram::Solve() const {
  constexpr int kMostRounds = 100;
  Tableau tableau(worth_, most_);
  std::vector<double> x = tableau.Point();
  for (int round = 0; round < kMostRounds; ++round) {
    std::vector<const Row*> worst(worth_.size(), nullptr);
    std::vector<double> excess(worth_.size(), 0);
    for (const Row& row : rows_) {
      double sum = -row.limit;
      double size = row.limit;
      for (std::size_t t = row.begin; t < row.end; ++t) {
        const double part = terms_[t].times * x[terms_[t].column];
        sum += part;
        size += std::abs(part);
      }
      const std::size_t first = terms_[row.begin].column;
      if (sum > 10 * kTiny * std::max(1.0, size) && sum > excess[first]) {
        excess[first] = sum;
        worst[first] = &row;
      }
    }
    bool is_kept = true;
    for (const Row* row : worst) {
      if (row != nullptr) {
        tableau.Add({terms_.data() + row->begin, row->end - row->begin}, row->limit);
        is_kept = false;
      }
    }
    if (is_kept) {
      return tableau.value();
    }
    if (!tableau.Solve()) {
      return std::nullopt;
    }
    x = tableau.Point();
  }
  return std::nullopt;
}

}  // namespace shardwright
