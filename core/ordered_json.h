#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace shardwright {

// A document that JsonValue has accepted, with its keys in the order of the text. The library's own
// parser looks at all keys before each one, and at all elements of a list behind each one.
[[nodiscard]] nlohmann::ordered_json ParseOrdered(std::string_view text, const std::string& file);

// As people write it: with spaces behind ',' and ':', and values on a line of their own but where
// `is_on_one_line` says so of what contains them, at its indentation.
[[nodiscard]] std::string PrintedJson(const nlohmann::ordered_json& value,
                                      const std::function<bool(const nlohmann::ordered_json& value,
                                                               std::size_t indent)>& is_on_one_line,
                                      std::size_t indent = 0);

}  // namespace shardwright
