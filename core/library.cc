#include "core/library.h"

#include <cstdlib>

#include <unistd.h>

namespace shardwright {

void* OpenLibrary(const std::string& name, std::string* problem, int scope) {
  const bool is_path = name.find('/') != std::string::npos;
  if (name.empty() || (is_path && name[0] != '/')) {
    if (problem->empty()) {
      *problem = "library \"" + name + "\": expected an absolute path";
    }
    return nullptr;
  }
  void* const library = dlopen(name.c_str(), RTLD_NOW | scope);
  if (library == nullptr && problem->empty()) {
    *problem = dlerror();
  }
  return library;
}

void* LoadLibrary(const char* variable, std::vector<std::string> names, std::string_view built,
                  std::string* problem) {
  if (const char* const path = std::getenv(variable); path != nullptr) {
    names = {path};
  } else if (!built.empty()) {
    names.emplace_back(built);
  }
  for (const std::string& name : names) {
    if (void* const library = OpenLibrary(name, problem); library != nullptr) {
      return library;
    }
  }
  return nullptr;
}

std::string ProgramFolder() {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace shardwright
