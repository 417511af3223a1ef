#pragma once

// Small things that many texts are made of.

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace shardwright {

// `text` with the letters A to Z as a to z.
[[nodiscard]] std::string LowerCase(std::string_view text);

[[nodiscard]] inline bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

[[nodiscard]] inline std::string Quoted(std::string_view text) {
  return '"' + std::string(text) + '"';
}

// The number that `text` is, without a blank or a plus; nothing where it is none or too large.
[[nodiscard]] std::optional<std::int64_t> IntegerIn(std::string_view text);
[[nodiscard]] std::optional<double> NumberIn(std::string_view text);

// By a format of printf for one double.
[[nodiscard]] std::string Fixed(double value, const char* format);

// "a, b, c": items, or what `part` makes of each, that are texts or integers.
template <class Items, class Part = std::identity>
[[nodiscard]] std::string Listed(const Items& items, Part part = {},
                                 std::string_view between = ", ") {
  std::string text;
  bool is_first = true;
  for (const auto& item : items) {
    text += is_first ? std::string_view() : between;
    is_first = false;
    const auto& word = std::invoke(part, item);
    if constexpr (std::integral<std::decay_t<decltype(word)>>) {
      text += std::to_string(word);
    } else {
      text += word;
    }
  }
  return text;
}

// "[768, 2304]".
[[nodiscard]] inline std::string ShapeText(std::span<const std::int64_t> shape) {
  return "[" + Listed(shape) + "]";
}

}  // namespace shardwright
