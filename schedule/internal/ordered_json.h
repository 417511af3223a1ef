#pragma once

#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace shardwright::internal {

// A document that JsonValue has accepted, with its keys in the order of the text. The library looks
// for each key among all before it: throws InputError naming `file` where that would take seconds.
[[nodiscard]] nlohmann::ordered_json ParseOrdered(std::string_view text, const std::string& file);

}  // namespace shardwright::internal
