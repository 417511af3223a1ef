#pragma once

// Libraries that a run loads when it needs them.

#include <string>
#include <string_view>
#include <vector>

#include <dlfcn.h>

namespace shardwright {

// The library at the path in the environment variable `variable`; where that is not set the first
// of `names` that the loader finds, then the one at `built`, a path from when this was built
// (empty: there was none). Null when there is none; then `problem` is the loader's text about the
// first.
[[nodiscard]] void* LoadLibrary(const char* variable, std::vector<std::string> names,
                                std::string_view built, std::string* problem);

// Sets *function; false when the library has no such function.
template <class Function>
[[nodiscard]] bool FindFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace shardwright
