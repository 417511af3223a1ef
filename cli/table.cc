#include "cli/table.h"

#include <algorithm>
#include <array>
#include <cstdio>

namespace shardwright {

std::string WithCommas(std::int64_t value) {
  std::string digits = std::to_string(value);
  const std::size_t sign = value < 0 ? 1 : 0;
  for (std::size_t place = digits.size(); place > sign + 3;) {
    place -= 3;
    digits.insert(place, 1, ',');
  }
  return digits;
}

std::string Percent(double fraction) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.1f %%", 100.0 * fraction);
  return text.data();
}

std::string Table::Text(std::size_t indent) const {
  std::vector<std::size_t> widths(columns_.size(), 0);
  for (const std::vector<std::string>& row : rows_) {
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      widths[c] = std::max(widths[c], row[c].size());
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : rows_) {
    std::string line(indent, ' ');
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      const std::string padding(widths[c] - row[c].size(), ' ');
      line += c > 0 ? "  " : "";
      line += columns_[c] == Align::kLeft ? row[c] + padding : padding + row[c];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + '\n';
  }
  return text;
}

}  // namespace shardwright
