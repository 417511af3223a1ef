#pragma once

#include <string>
#include <string_view>

namespace shardwright {

// `text` with the letters A to Z as a to z.
[[nodiscard]] std::string LowerCase(std::string_view text);

}  // namespace shardwright
