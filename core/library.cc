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
                  std::string* problem, const std::function<std::string(void*)>& wrong_with) {
  if (const char* const path = std::getenv(variable); path != nullptr) {
    names = {path};
  } else if (!built.empty()) {
    names.emplace_back(built);
  }
  std::string first_wrong;
  for (const std::string& name : names) {
    if (void* const library = OpenLibrary(name, problem); library != nullptr) {
      const std::string wrong = wrong_with ? wrong_with(library) : std::string();
      if (wrong.empty()) {
        return library;
      }
      first_wrong = first_wrong.empty() ? wrong : first_wrong;
    }
  }
  *problem = first_wrong.empty() ? *problem : first_wrong;
  return nullptr;
}

std::string ProgramFolder() {
  std::string path(4096, '\0');
  const ssize_t length = ::readlink("/proc/self/exe", path.data(), path.size());
  path.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
  return path.substr(0, path.rfind('/') + 1);
}

}  // namespace shardwright
