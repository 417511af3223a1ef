#pragma once

// Text inside pages and pictures.

#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// For element content and quoted attribute values. Control characters, which HTML forbids, become
// U+FFFD.
[[nodiscard]] std::string EscapeHtml(std::string_view text);

// JSON that a script element may hold: no `<`, `>` or `&`, and no line separator of JavaScript.
// Requires valid JSON; the result parses to the same value.
[[nodiscard]] std::string EscapeJson(std::string_view json);

// "12.3", at most one decimal; enough for pixels.
[[nodiscard]] std::string Pixels(double value);

// A table; all cells are escaped. The first column is text and heads its row, the others are
// numbers where `is_number` says so.
struct HtmlTable {
  std::string caption;
  std::vector<std::string> head;
  std::vector<bool> is_number;  // by column
  std::vector<std::vector<std::string>> rows;
};
// Nothing for a table without rows.
[[nodiscard]] std::string HtmlOf(const HtmlTable& table);

}  // namespace shardwright
