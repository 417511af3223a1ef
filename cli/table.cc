#include "cli/table.h"

#include <algorithm>

#include "core/printable.h"

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
  return Fixed(100.0 * fraction, "%.1f %%");
}

std::string SignedPercent(double fraction) {
  return Fixed(100 * fraction, "%+.1f %%");
}

std::string Wrapped(const std::string& text, std::size_t width, std::size_t indent) {
  std::string wrapped;
  std::size_t begin = 0;
  while (begin < text.size()) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    while (line.size() > width) {
      const std::size_t at = line.rfind(' ', width);
      if (at == std::string::npos || at <= indent) {
        break;
      }
      wrapped += line.substr(0, line.find_last_not_of(' ', at) + 1) + '\n';
      line = std::string(indent, ' ') + line.substr(at + 1);
    }
    wrapped += line + '\n';
  }
  return wrapped;
}

void Table::Row(const std::vector<std::string>& cells) {
  std::vector<std::string>& row = rows_.emplace_back();
  for (const std::string& cell : cells) {
    row.push_back(PrintableLine(cell));
  }
}

std::vector<std::size_t> Table::Widths() const {
  std::vector<std::size_t> widths(columns_.size(), 0);
  for (const std::vector<std::string>& row : rows_) {
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      widths[c] = std::max(widths[c], row[c].size());
    }
  }
  return widths;
}

std::string Table::Text(std::size_t indent) const {
  const std::vector<std::size_t> widths = Widths();
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

std::string Table::WrappedText(std::size_t indent) const {
  constexpr std::size_t kDeepest = 60;  // so that a line has room for words
  const std::vector<std::size_t> widths = Widths();
  std::size_t last = indent;
  for (std::size_t c = 0; c + 1 < widths.size(); ++c) {
    last += widths[c] + 2;
  }
  return Wrapped(Text(indent), kReportWidth, std::min(last, kDeepest));
}

}  // namespace shardwright
