#include "executor/cuda/library.h"

#include <cstdlib>

namespace shardwright {

void* LoadLibrary(const char* variable, std::vector<std::string> names, std::string_view built,
                  std::string* problem) {
  if (const char* const path = std::getenv(variable); path != nullptr) {
    names = {path};
  } else if (!built.empty()) {
    names.emplace_back(built);
  }
  for (const std::string& name : names) {
    void* const library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) {
      return library;
    }
    *problem = problem->empty() ? dlerror() : *problem;
  }
  return nullptr;
}

}  // namespace shardwright
