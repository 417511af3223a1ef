#pragma once

// Text for people: aligned tables, grouped digits, short numbers.

#include <cstdint>
#include <string>
#include <vector>

#include "core/text.h"  // Fixed, which cells are made with, too
#include "core/units.h"

namespace shardwright {

// 8030261248 -> "8,030,261,248".
[[nodiscard]] std::string WithCommas(std::int64_t value);
// "12.3 %".
[[nodiscard]] std::string Percent(double fraction);
[[nodiscard]] std::string SignedPercent(double fraction);

// Lines of at most `width` characters: longer ones are broken at spaces, and what goes on stands
// below `indent` spaces. Words that do not fit stay whole.
[[nodiscard]] std::string Wrapped(const std::string& text, std::size_t width, std::size_t indent);
// Columns that reports for people keep to.
inline constexpr std::size_t kReportWidth = 120;

// A table whose columns are as wide as their longest cell.
class Table {
 public:
  enum class Align : std::uint8_t { kLeft, kRight };

  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}
  // Requires as many cells as columns. A cell is one line: names have what they have
  // (PrintableLine).
  void Row(const std::vector<std::string>& cells);
  // Two spaces between columns, `indent` spaces before each line, no blanks at line ends.
  [[nodiscard]] std::string Text(std::size_t indent = 0) const;
  // The same in kReportWidth columns: what the last column, of texts, has too much goes on below.
  [[nodiscard]] std::string WrappedText(std::size_t indent) const;

 private:
  [[nodiscard]] std::vector<std::size_t> Widths() const;

  std::vector<Align> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace shardwright
