#pragma once

// One failure ends the run on all ranks: whoever waits is woken and told why.

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace shardwright {

// Why a rank gives the run up: "rank 0, op mb0.head.fwd: waited 2000 ms for ranks 1, 2".
// `is_one_of`: it is not known for which of them.
[[nodiscard]] std::string WaitedText(std::int64_t rank, const std::string& what,
                                     std::chrono::milliseconds limit,
                                     const std::set<std::int64_t>& missing, bool is_one_of = false);

// Shared by all threads of a run. Waiting objects register their mutex and condition variable
// before any thread starts, and withdraw before they go if the board outlives them; every wait's
// predicate must ask failed().
class FaultBoard {
 public:
  void Register(std::mutex& mutex, std::condition_variable& changed);
  // Waits while a report wakes the registered ones. Must not be called with `mutex` held.
  void Withdraw(const std::mutex& mutex);
  // `watcher` is called with the first cause, at once if there is one.
  void OnReport(std::function<void(const std::string& cause)> watcher);
  // The first cause is kept. `is_environment`: the machine's failure, not the run's. Must not be
  // called with a registered mutex held.
  void Report(const std::string& cause, bool is_environment = false);
  // Likewise `error`, thrown at `where`, such as "rank 0, op head.fwd: ".
  void Report(const std::string& where, const std::exception& error);
  [[nodiscard]] bool failed() const;
  [[nodiscard]] bool is_environment() const;
  // Throws RunError or EnvironmentError with the cause if there is one.
  void ThrowIfFailed() const;

 private:
  mutable std::mutex mutex_;
  bool failed_ = false;  // guarded by mutex_, like is_environment_ and cause_
  bool is_environment_ = false;
  std::string cause_;
  std::function<void(const std::string&)> watcher_;  // guarded by mutex_
  std::mutex waiters_mutex_;  // guards waiters_; taken before the mutex of a waiter
  std::vector<std::pair<std::mutex*, std::condition_variable*>> waiters_;
};

}  // namespace shardwright
