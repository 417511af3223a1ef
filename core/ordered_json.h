#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace shardwright {

// A document that JsonValue has accepted, with its keys in the order of the text. The library's own
// parser looks at all keys before each one, and at all elements of a list behind each one.
[[nodiscard]] nlohmann::ordered_json ParseOrdered(std::string_view text, const std::string& file);

}  // namespace shardwright
