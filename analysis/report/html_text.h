#pragma once

// Text inside pages.

#include <string>
#include <string_view>

namespace shardwright {

// For element content and quoted attribute values. Control characters, which HTML forbids, become
// U+FFFD.
[[nodiscard]] std::string EscapeHtml(std::string_view text);

// JSON that a script element may hold: no `<`, `>` or `&`, and no line separator of JavaScript.
// Requires valid JSON; the result parses to the same value.
[[nodiscard]] std::string EscapeJson(std::string_view json);

}  // namespace shardwright
