#pragma once

// Libraries that are loaded when they are needed. Nothing else in the program calls dlopen, so that
// none comes from a folder that the user only happens to be in (docs/security.md).

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <dlfcn.h>

namespace shardwright {

// The library `name`: an absolute path, or a bare name that the system's loader looks for. Null
// when there is none, or `name` is a path from the current folder; then *problem says why, unless
// it already says something. `scope`: RTLD_LOCAL or RTLD_GLOBAL.
[[nodiscard]] void* OpenLibrary(const std::string& name, std::string* problem,
                                int scope = RTLD_LOCAL);

// The library at the path in the environment variable `variable`; where that is not set the first
// of `names` that the loader finds, then the one at `built`, a path from when this was built
// (empty: there was none). `wrong_with` tells what is wrong with one that was opened; then the next
// one is tried. Null when there is none; then `problem` is what was wrong with the first that was
// opened, else the loader's text about the first.
[[nodiscard]] void* LoadLibrary(const char* variable, std::vector<std::string> names,
                                std::string_view built, std::string* problem,
                                const std::function<std::string(void*)>& wrong_with = {});

// The folder of this program, with a slash at its end; empty where the system does not tell it.
[[nodiscard]] std::string ProgramFolder();

// Sets *function; false when the library has no such function.
template <class Function>
[[nodiscard]] bool FindFunction(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace shardwright
