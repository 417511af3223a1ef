#include "cli/guard.h"

#include <exception>
#include <new>
#include <string>

#include <nlohmann/json.hpp>

#include "cli/exit_codes.h"
#include "core/error.h"
#include "core/printable.h"

namespace shardwright {
namespace {

int Fail(int code, const std::string& label, const char* text) {
  Say(label + ": " + text);
  return code;
}

}  // namespace

int GuardedRun(const std::function<int()>& body) {
  try {
    return body();
  } catch (const UsageError& error) {
    return Fail(kExitUsage, "error", error.what());
  } catch (const InputError& error) {
    return Fail(kExitInput, "error", error.what());
  } catch (const EnvironmentError& error) {
    return Fail(kExitEnvironment, "error", error.what());
  } catch (const RunError& error) {
    return Fail(kExitRun, "error", error.what());
  } catch (const std::bad_alloc&) {
    return Fail(kExitEnvironment, "error", "this machine has too little memory for that");
  } catch (const nlohmann::json::type_error& error) {
    constexpr int kNoUtf8 = 316;
    return error.id != kNoUtf8
               ? Fail(kExitBug, "shardwright: internal error", error.what())
               : Fail(kExitInput, "error",
                      "a name of a file, or a value, is no UTF-8, expected one that "
                      "JSON can hold; rename it");
  } catch (const std::exception& error) {
    return Fail(kExitBug, "shardwright: internal error", error.what());
  }
}

}  // namespace shardwright
