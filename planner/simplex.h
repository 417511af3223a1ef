#pragma once

// Solves linear programs of a hundred columns and thousands of rows, few of which bind.
//
// Example: two columns, worth 3 and 2, at most 4 each, and the row x + y <= 5. Solve returns 14, at
// x = 4 and y = 1.

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace shardwright {

// max sum worth * x  where  0 <= x <= most  and every row holds. x = 0 keeps them all.
class LinearProgram {
 public:
  struct Term {
    std::size_t column = 0;
    double times = 0;
  };

  // Returns the column.
  std::size_t AddColumn(double worth, double most);
  void AddWorth(std::size_t column, double worth) { worth_[column] += worth; }
  // sum times * x <= limit, limit >= 0. Not empty. No column twice. Of all rows with the same first
  // column few bind.
  void AddRow(std::span<const Term> terms, double limit);

  // The maximum, to one part in 10^8; nothing where rounding is in the way.
  [[nodiscard]] std::optional<double> Solve() const;

 private:
  struct Row {
    std::size_t begin = 0, end = 0;  // of terms_
    double limit = 0;
  };

  std::vector<double> worth_, most_;
  std::vector<Row> rows_;
  std::vector<Term> terms_;
};

}  // namespace shardwright
