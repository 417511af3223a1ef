// The program `shardwright`: the only place that catches exceptions and chooses exit codes.

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

#include <unistd.h>

#include "cli/command_line.h"
#include "cli/commands.h"
#include "cli/exit_codes.h"
#include "core/error.h"

namespace {

// Only async-signal-safe calls. Files are written while interrupts are held back, so nothing is
// half-written when this runs.
extern "C" void OnInterrupt(int /*signal*/) {
  constexpr char kText[] = "interrupted\n";
  const ssize_t written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
  (void)written;
  ::_exit(shardwright::kExitInterrupted);
}

int Fail(int code, const char* label, const char* text) {
  std::fprintf(stderr, "%s: %s\n", label, text);
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGINT, OnInterrupt);
  try {
    return shardwright::RunCommand(shardwright::ParseCommandLine(argc, argv));
  } catch (const shardwright::UsageError& error) {
    return Fail(shardwright::kExitUsage, "error", error.what());
  } catch (const shardwright::InputError& error) {
    return Fail(shardwright::kExitInput, "error", error.what());
  } catch (const shardwright::EnvironmentError& error) {
    return Fail(shardwright::kExitEnvironment, "error", error.what());
  } catch (const shardwright::RunError& error) {
    return Fail(shardwright::kExitRun, "error", error.what());
  } catch (const std::bad_alloc&) {
    return Fail(shardwright::kExitEnvironment, "error",
                "this machine has too little memory for that");
  } catch (const std::exception& error) {
    return Fail(shardwright::kExitBug, "shardwright: internal error", error.what());
  }
}
