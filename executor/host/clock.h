#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>

#include "core/units.h"

namespace shardwright {

// Time since its construction or a given moment, of the machine's steady clock: the same for all
// threads.
class RunClock {
 public:
  RunClock() = default;
  // Counts from another moment.
  explicit RunClock(std::chrono::steady_clock::time_point start) : start_(start) {}
  [[nodiscard]] SimTime Now() const { return TimeOf(std::chrono::steady_clock::now()); }
  [[nodiscard]] SimTime TimeOf(std::chrono::steady_clock::time_point moment) const {
    const auto elapsed = std::chrono::duration_cast<std::chrono::nanoseconds>(moment - start_);
    return SimTime(elapsed.count() * kPicosecondsPerNanosecond);
  }
  [[nodiscard]] std::chrono::steady_clock::time_point At(SimTime time) const {
    return start_ + std::chrono::nanoseconds(time.value / kPicosecondsPerNanosecond);
  }

 private:
  static constexpr std::int64_t kPicosecondsPerNanosecond = 1000;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// What the calling thread has computed so far: its time on a core.
[[nodiscard]] inline SimTime ThreadCpuTime() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  constexpr std::int64_t kPicosPerSecond = 1'000'000'000'000;
  constexpr std::int64_t kPicosPerNano = 1000;
  return SimTime(std::int64_t{now.tv_sec} * kPicosPerSecond +
                 std::int64_t{now.tv_nsec} * kPicosPerNano);
}

}  // namespace shardwright
