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

}  // namespace shardwright
