#include "cli/guard.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <new>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "cli/exit_codes.h"
#include "core/error.h"
#include "core/printable.h"
#include "core/text.h"

namespace shardwright {
namespace {

int Fail(int code, const std::string& label, const char* text) {
  SayOnce(label + ": " + text);
  return code;
}

}  // namespace

void SayOnce(const std::string& line) {
  const char* const text = std::getenv(kSaidVariable);
  const auto file = static_cast<int>(IntegerIn(text == nullptr ? "" : text).value_or(-1));
  struct flock lock {};
  lock.l_type = F_WRLCK;
  // Only what memfd_create has made has seals.
  if (::fcntl(file, F_GET_SEALS) < 0 || ::fcntl(file, F_SETLKW, &lock) != 0) {
    Say(line);
    return;
  }
  std::string said(std::size_t{1} << 16, '\0');
  said.resize(
      static_cast<std::size_t>(std::max<ssize_t>(0, ::pread(file, said.data(), said.size(), 0))));
  const std::string entry = line + '\n';
  if (said.find(entry) == std::string::npos) {
    (void)!::pwrite(file, entry.data(), entry.size(), static_cast<off_t>(said.size()));
    Say(line);
  }
  lock.l_type = F_UNLCK;
  (void)::fcntl(file, F_SETLK, &lock);
}

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
