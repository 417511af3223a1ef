#include "executor/host/fault.h"

#include "core/error.h"

namespace shardwright {

void FaultBoard::Register(std::mutex& mutex, std::condition_variable& changed) {
  const std::lock_guard lock(waiters_mutex_);
  waiters_.emplace_back(&mutex, &changed);
}

void FaultBoard::Withdraw(const std::mutex& mutex) {
  const std::lock_guard lock(waiters_mutex_);
  std::erase_if(waiters_, [&](const auto& waiter) { return waiter.first == &mutex; });
}

void FaultBoard::Report(const std::string& cause) {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      return;
    }
    failed_ = true;
    cause_ = cause;
  }
  if (watcher_) {
    watcher_(cause);
  }
  const std::lock_guard waiters(waiters_mutex_);
  for (const auto& [mutex, changed] : waiters_) {
    // With the lock, no waiter is between its predicate and its sleep.
    const std::lock_guard lock(*mutex);
    changed->notify_all();
  }
}

bool FaultBoard::failed() const {
  const std::lock_guard lock(mutex_);
  return failed_;
}

void FaultBoard::ThrowIfFailed() const {
  const std::lock_guard lock(mutex_);
  if (failed_) {
    throw RunError(cause_);
  }
}

}  // namespace shardwright
