#pragma once

// SIGINT, SIGTERM and SIGHUP as a wish that a run end in good order.

namespace shardwright {

// While this exists a first signal only sets a mark, so that the run can save what it has; a second
// one ends the process at once. There is at most one of these.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // Has one come? Any thread may ask.
  [[nodiscard]] static bool Asked();
};

// How many of them have come since InstallSignalCount, for a process that only waits for others: it
// passes them on.
void InstallSignalCount();
[[nodiscard]] int SignalCount();

// Until then, and for good: the process ends at once with the exit code of an interruption. A
// mapped file that was cut short ends it with one line and kExitEnvironment.
void EndOnSignals();

}  // namespace shardwright
