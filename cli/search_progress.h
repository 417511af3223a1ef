#pragma once

#include <functional>
#include <string>

#include "planner/search.h"

namespace shardwright {

// Says now and then on standard error how far a search is, as long as it lives: a terminal sees one
// line that changes; with `ticks` anything else sees a line every ten seconds. In a browser it is
// the page that hears (web/without.cc). `name`, such as "fsdp2 with ep 8", stands before it.
[[nodiscard]] std::function<void(const SearchProgress&)> ProgressLines(
    bool ticks, const std::string& name = "");

}  // namespace shardwright
