#pragma once

// Loop variables in the names of a model.json.

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace shardwright {

// Values of the loop variables around an entry, outermost first.
using LoopValues = std::vector<std::pair<std::string, std::int64_t>>;

// `text` with "{i}", "{i+1}", "{i-2}" replaced; nothing where another variable stands in it.
[[nodiscard]] std::optional<std::string> Substitute(std::string text, const LoopValues& loops);

}  // namespace shardwright
