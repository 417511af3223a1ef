#include "schedule/internal/ordered_json.h"

#include <cstdint>
#include <vector>

#include <nlohmann/json.hpp>

#include "core/budget.h"

namespace shardwright::internal {

nlohmann::ordered_json ParseOrdered(std::string_view text, const std::string& file) {
  using Json = nlohmann::ordered_json;
  constexpr std::int64_t kMostComparisons = 200'000'000;  // an object of 20,000 keys
  Budget comparisons(file, "comparisons of keys", kMostComparisons);
  std::vector<std::int64_t> keys;  // so far, of the objects that are open
  return Json::parse(text, [&](int /*depth*/, Json::parse_event_t event, Json& /*value*/) {
    if (event == Json::parse_event_t::object_start) {
      keys.push_back(0);
    } else if (event == Json::parse_event_t::object_end) {
      keys.pop_back();
    } else if (event == Json::parse_event_t::key) {
      comparisons.Take(++keys.back());
    }
    return true;
  });
}

}  // namespace shardwright::internal
