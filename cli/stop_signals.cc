#include "cli/stop_signals.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <string_view>

#include <time.h>
#include <unistd.h>

#include "cli/exit_codes.h"

namespace shardwright {
namespace {

std::atomic<int> count{0};
std::atomic<int> first{0};                // the first signal; 0: none yet
std::atomic<std::int64_t> first_time{0};  // in ms

static_assert(std::atomic<std::int64_t>::is_always_lock_free);

// In handlers only async-signal-safe calls are allowed.
void SayInHandler(std::string_view text) {
  const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  (void)written;
}

std::int64_t NowMilliseconds() {
  timespec now{};
  (void)::clock_gettime(CLOCK_MONOTONIC, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

// Files are written while interrupts are held back, so nothing is half-written when this runs.
extern "C" void OnEndSignal(int /*signal*/) {
  SayInHandler("interrupted\n");
  ::_exit(kExitInterrupted);
}

// Behind a Ctrl-C, which the terminal sends to all processes, launchers send SIGTERM to theirs:
// that is no second wish. SIGHUP never is one: a terminal that closes sends it as its shell does.
extern "C" void OnStopSignal(int signal) {
  constexpr std::int64_t kEcho = 2000;  // ms
  int none = 0;
  if (first.compare_exchange_strong(none, signal)) {
    first_time = NowMilliseconds();
    SayInHandler(
        "interrupted: the step at hand is finished, then all is saved; a second signal ends the "
        "run at once\n");
    return;
  }
  if (signal != SIGHUP && (signal == first || NowMilliseconds() - first_time > kEcho)) {
    OnEndSignal(signal);
  }
}

// Weights and data are mapped: a page behind the end of a file that was cut short meanwhile does
// not exist. Nothing else in the program can raise this.
extern "C" void OnLostPage(int /*signal*/) {
  SayInHandler("error: a file of data or weights was cut short while it was read\n");
  ::_exit(kExitEnvironment);
}

extern "C" void OnCountedSignal(int /*signal*/) {
  ++count;
}

constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
std::array<struct sigaction, kSignals.size()> before;  // those of kSignals, before StopSignals

void Install(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigemptyset(&action.sa_mask);
  for (const int signal : kSignals) {
    struct sigaction old {};
    (void)::sigaction(signal, nullptr, &old);
    if (signal != SIGHUP || old.sa_handler != SIG_IGN) {  // nohup's
      (void)::sigaction(signal, &action, nullptr);
    }
  }
}

}  // namespace

StopSignals::StopSignals() {
  first = 0;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    (void)::sigaction(kSignals[i], nullptr, &before[i]);
  }
  Install(OnStopSignal);
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    (void)::sigaction(kSignals[i], &before[i], nullptr);
  }
}

bool StopSignals::Asked() {
  return first != 0;
}

void InstallSignalCount() {
  Install(OnCountedSignal);
}

int SignalCount() {
  return count;
}

void EndOnSignals() {
  Install(OnEndSignal);
  std::signal(SIGBUS, OnLostPage);
}

}  // namespace shardwright
