#pragma once

// The one place that starts threads, and what ends their work early.

#include <atomic>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

namespace shardwright {

// What ends the work of a thread whose stop flag is set. No std::exception: nobody on the way takes
// it for a failure.
struct Interrupted {};

// The flag that ends what this thread does, and the threads that it starts; null: nothing does.
[[nodiscard]] const std::atomic<bool>*& StopFlag();
// Throws Interrupted once that flag is set. All long loops call it.
void ThrowIfStopped();

// Throws EnvironmentError with the limits that may be the cause.
[[noreturn]] void FailWithoutThread(const std::system_error& error);

// Starts a std::thread or std::jthread that runs `work`. Throws EnvironmentError where the system
// gives none.
template <class T = std::thread, class F>
[[nodiscard]] T StartThread(F work) {
  // The type is written: to deduce it, libc++ would compile calls that nobody makes.
  auto run = [flag = StopFlag(), work = std::move(work)](auto... token) mutable -> void {
    StopFlag() = flag;
    if constexpr (std::is_invocable_v<F&>) {
      work();
    } else {
      work(token...);
    }
  };
  try {
    return T(std::move(run));
  } catch (const std::system_error& error) {
    FailWithoutThread(error);
  }
}

}  // namespace shardwright
