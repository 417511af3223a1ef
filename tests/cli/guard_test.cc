#include "cli/guard.h"

#include <new>
#include <stdexcept>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "cli/exit_codes.h"
#include "core/error.h"

namespace shardwright {
namespace {

// The table of docs/cli.md.
TEST_CASE("GuardedRun: exit codes") {
  CHECK(GuardedRun([] { return 0; }) == 0);
  CHECK(GuardedRun([] { return 1; }) == 1);
  CHECK(GuardedRun([]() -> int { throw UsageError("u"); }) == 2);
  CHECK(GuardedRun([]() -> int { throw InputError("i"); }) == 3);
  CHECK(GuardedRun([]() -> int { throw EnvironmentError("e"); }) == 4);
  CHECK(GuardedRun([]() -> int { throw std::bad_alloc(); }) == 4);
  CHECK(GuardedRun([]() -> int { throw RunError("r"); }) == 5);
  CHECK(GuardedRun([]() -> int { throw std::logic_error("l"); }) == 70);
  // A folder's name may be no UTF-8; JSON is.
  CHECK(GuardedRun([] { return static_cast<int>(nlohmann::json("\xff").dump().size()); }) == 3);
  CHECK(GuardedRun([] { return nlohmann::json(1).get<std::string>() == "1" ? 1 : 0; }) == 70);
  CHECK(kExitInterrupted == 130);
}

}  // namespace
}  // namespace shardwright
