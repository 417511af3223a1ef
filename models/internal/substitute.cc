#include "models/internal/substitute.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <system_error>

#include "models/internal/builder.h"

namespace shardwright {

std::optional<std::string> Substitute(std::string text, const LoopValues& loops) {
  std::string result;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t open = text.find('{', at);
    if (open == std::string::npos) {
      return at == 0 ? std::move(text) : result + text.substr(at);
    }
    result += text.substr(at, open - at);
    const std::size_t close = text.find('}', open);
    const std::string inside =
        text.substr(open + 1, close == std::string::npos ? close : close - open - 1);
    const std::size_t sign = inside.find_first_of("+-");
    const std::string variable = inside.substr(0, sign);
    std::int64_t offset = 0;
    bool is_valid = close != std::string::npos;
    if (sign != std::string::npos) {
      // from_chars reads a minus but no plus.
      const char* begin = inside.data() + sign + (inside[sign] == '+' ? 1 : 0);
      const char* end = inside.data() + inside.size();
      const auto parsed = std::from_chars(begin, end, offset);
      is_valid = is_valid && parsed.ec == std::errc() && parsed.ptr == end &&
                 std::abs(offset) <= ModelLimits::kLayers;
    }
    const auto loop = std::find_if(loops.rbegin(), loops.rend(),
                                   [&](const auto& l) { return l.first == variable; });
    if (!is_valid || loop == loops.rend()) {
      return std::nullopt;
    }
    result += std::to_string(loop->second + offset);
    at = close + 1;
  }
  return result;
}

}  // namespace shardwright
