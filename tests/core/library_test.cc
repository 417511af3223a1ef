#include "core/library.h"

#include <cstdlib>
#include <string>

#include <doctest/doctest.h>

namespace shardwright {

TEST_CASE("OpenLibrary: a bare name is looked for by the system, a path must be absolute") {
  std::string problem;
  CHECK(OpenLibrary("libm.so.6", &problem) != nullptr);
  CHECK(problem.empty());
  for (const std::string name : {"./libm.so.6", "lib/libm.so.6", "../libm.so.6", ""}) {
    CAPTURE(name);
    problem.clear();
    CHECK(OpenLibrary(name, &problem) == nullptr);
    CHECK(problem == "library \"" + name + "\": expected an absolute path");
  }
  CHECK(OpenLibrary("/nowhere/libm.so.6", &problem) == nullptr);
  CHECK(problem == "library \"\": expected an absolute path");  // the first problem stays
}

TEST_CASE("LoadLibrary: a variable's path from the current folder is refused as well") {
  ::setenv("SHARDWRIGHT_TEST_LIBRARY", "lib/libm.so.6", 1);
  std::string problem;
  CHECK(LoadLibrary("SHARDWRIGHT_TEST_LIBRARY", {"libm.so.6"}, "", &problem) == nullptr);
  CHECK(problem == "library \"lib/libm.so.6\": expected an absolute path");
  ::unsetenv("SHARDWRIGHT_TEST_LIBRARY");
  CHECK(LoadLibrary("SHARDWRIGHT_TEST_LIBRARY", {"libm.so.6"}, "", &problem) != nullptr);
}

TEST_CASE("LoadLibrary: a library that is refused does not keep from the next one") {
  std::string problem, refused;
  const auto refuses = [&](int count) {
    return [&, count, seen = 0](void*) mutable {
      refused = ++seen <= count ? "refused " + std::to_string(seen) : "";
      return refused;
    };
  };
  const std::vector<std::string> names = {"libm.so.6", "libnone.so.7", "libc.so.6"};
  void* const second = OpenLibrary("libc.so.6", &problem);
  CHECK(LoadLibrary("SHARDWRIGHT_TEST_LIBRARY", names, "", &problem, refuses(1)) == second);
  CHECK(LoadLibrary("SHARDWRIGHT_TEST_LIBRARY", names, "", &problem, refuses(2)) == nullptr);
  CHECK(problem == "refused 1");  // not that one is not there
}

}  // namespace shardwright
