// The program `shardwright`.

#include <csignal>

#include <unistd.h>

#include "cli/command_line.h"
#include "cli/exit_codes.h"
#include "cli/guard.h"

namespace {

// Only async-signal-safe calls. Files are written while interrupts are held back, so nothing is
// half-written when this runs.
extern "C" void OnInterrupt(int /*signal*/) {
  constexpr char kText[] = "interrupted\n";
  const ssize_t written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
  (void)written;
  ::_exit(shardwright::kExitInterrupted);
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGINT, OnInterrupt);
  return shardwright::GuardedRun([&] { return shardwright::RunCommandLine(argc, argv); });
}
