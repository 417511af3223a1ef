#include "cli/guard.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <mutex>
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

// What kSaidVariable names, if it is RunLocalProcesses' file, which alone has its seal; -1:
// nothing. Processes that this one starts get neither.
int SaidFile() {
  static const int file = [] {
    const char* const text = std::getenv(kSaidVariable);
    const auto its = static_cast<int>(IntegerIn(text == nullptr ? "" : text).value_or(-1));
    const int seals = ::fcntl(its, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_SEAL)) != F_SEAL_SHRINK) {
      return -1;
    }
    (void)::fcntl(its, F_SETFD, FD_CLOEXEC);
    (void)::unsetenv(kSaidVariable);
    return its;
  }();
  return file;
}

int Fail(int code, const std::string& label, const char* text) {
  SayOnce(label + ": " + text);
  return code;
}

}  // namespace

void SayOnce(const std::string& line) {
  static std::mutex mutex;  // the file's lock keeps other processes out, not other threads
  const std::lock_guard guard(mutex);
  const int file = SaidFile();
  struct flock lock {};
  lock.l_type = F_WRLCK;
  if (file < 0 || ::fcntl(file, F_SETLKW, &lock) != 0) {
    Say(line);
    return;
  }
  std::string said(std::size_t{1} << 16, '\0');
  said.resize(
      static_cast<std::size_t>(std::max<ssize_t>(0, ::pread(file, said.data(), said.size(), 0))));
  const std::string entry = line + '\n';
  if (!said.starts_with(entry) && said.find('\n' + entry) == std::string::npos) {
    (void)!::pwrite(file, entry.data(), entry.size(), static_cast<off_t>(said.size()));
    Say(line);
  }
  lock.l_type = F_UNLCK;
  (void)::fcntl(file, F_SETLK, &lock);
}

int GuardedRun(const std::function<int()>& body) {
  (void)SaidFile();  // before there are threads, which may read the environment
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
