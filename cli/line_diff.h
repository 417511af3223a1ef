#pragma once

#include <string>

namespace shardwright {

// What turns one text into the other, as `patch -p1` takes it: hunks with three lines of context,
// named a/`name` and b/`name`. Empty for equal texts. Beyond some thousand lines on each side
// between the first and the last change, all between them counts as changed.
[[nodiscard]] std::string UnifiedDiff(const std::string& before, const std::string& after,
                                      const std::string& name);

}  // namespace shardwright
