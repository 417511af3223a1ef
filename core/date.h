#pragma once

#include <string_view>

namespace shardwright {

// YYYY-MM-DD, with a month and a day that exist in some month.
[[nodiscard]] bool IsDate(std::string_view text);

}  // namespace shardwright
