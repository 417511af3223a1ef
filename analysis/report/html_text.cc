#include "analysis/report/html_text.h"

#include <cmath>

#include "core/text.h"

namespace shardwright {

std::string EscapeHtml(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default: {
        const bool is_control =
            (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f;
        escaped += is_control ? std::string("\xEF\xBF\xBD") : std::string(1, c);
      }
    }
  }
  return escaped;
}

std::string EscapeJson(std::string_view json) {
  std::string escaped;
  escaped.reserve(json.size() + json.size() / 64);
  for (std::size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    // These can stand in strings only, where an escape means the same.
    if (c == '<') {
      escaped += "\\u003c";
    } else if (c == '>') {
      escaped += "\\u003e";
    } else if (c == '&') {
      escaped += "\\u0026";
    } else if (json.substr(i, 3) == "\xE2\x80\xA8" || json.substr(i, 3) == "\xE2\x80\xA9") {
      escaped += json[i + 2] == '\xA8' ? "\\u2028" : "\\u2029";
      i += 2;
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string Pixels(double value) {
  const double rounded = std::round(value * 10.0) / 10.0;
  std::string result = Fixed(rounded == 0.0 ? 0.0 : rounded, "%.1f");  // no "-0.0"
  if (result.ends_with(".0")) {
    result.resize(result.size() - 2);
  }
  return result;
}

std::string HtmlOf(const HtmlTable& table) {
  if (table.rows.empty()) {
    return "";
  }
  std::string html = "<div class=\"scroll\"><table>\n";
  if (!table.caption.empty()) {
    html += "<caption>" + EscapeHtml(table.caption) + "</caption>\n";
  }
  const auto cell_class = [&](std::size_t column) {
    return table.is_number[column] ? std::string(" class=\"number\"") : std::string();
  };
  html += "<thead><tr>";
  for (std::size_t c = 0; c < table.head.size(); ++c) {
    html.append("<th scope=\"col\"").append(cell_class(c)).append(">");
    html.append(EscapeHtml(table.head[c])).append("</th>");
  }
  html += "</tr></thead>\n<tbody>\n";
  for (const std::vector<std::string>& row : table.rows) {
    html += "<tr>";
    for (std::size_t c = 0; c < row.size(); ++c) {
      html.append(c == 0 ? "<th scope=\"row\"" : "<td").append(cell_class(c)).append(">");
      html.append(EscapeHtml(row[c])).append(c == 0 ? "</th>" : "</td>");
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

}  // namespace shardwright
