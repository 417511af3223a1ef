// The program `shardwright`.

#include <csignal>

#include "cli/command_line.h"
#include "cli/guard.h"
#include "cli/stop_signals.h"

int main(int argc, char** argv) {
  shardwright::EndOnSignals();
  std::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error to tell, not an end
  return shardwright::GuardedRun([&] { return shardwright::RunCommandLine(argc, argv); });
}
