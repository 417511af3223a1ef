#include "executor/host/fault.h"

#include <new>

#include "core/error.h"
#include "core/text.h"

namespace shardwright {

std::string WaitedText(std::int64_t rank, const std::string& what, std::chrono::milliseconds limit,
                       const std::set<std::int64_t>& missing, bool is_one_of) {
  return "rank " + std::to_string(rank) + ", " + what + ": waited " +
         std::to_string(limit.count()) + " ms for " + (is_one_of ? "one of " : "") +
         (missing.size() > 1 ? "ranks " : "rank ") + Listed(missing);
}

void FaultBoard::Register(std::mutex& mutex, std::condition_variable& changed) {
  const std::lock_guard lock(waiters_mutex_);
  waiters_.emplace_back(&mutex, &changed);
}

void FaultBoard::Withdraw(const std::mutex& mutex) {
  const std::lock_guard lock(waiters_mutex_);
  std::erase_if(waiters_, [&](const auto& waiter) { return waiter.first == &mutex; });
}

void FaultBoard::OnReport(std::function<void(const std::string& cause)> watcher) {
  std::string cause;
  {
    const std::lock_guard lock(mutex_);
    watcher_ = watcher;
    cause = cause_;
  }
  if (!cause.empty()) {
    watcher(cause);
  }
}

void FaultBoard::Report(const std::string& where, const std::exception& error) {
  Report(where + error.what(), dynamic_cast<const EnvironmentError*>(&error) != nullptr ||
                                   dynamic_cast<const std::bad_alloc*>(&error) != nullptr);
}

void FaultBoard::Report(const std::string& cause, bool is_environment) {
  std::function<void(const std::string&)> watcher;
  {
    const std::lock_guard lock(mutex_);
    if (failed_) {
      return;
    }
    failed_ = true;
    is_environment_ = is_environment;
    cause_ = cause;
    watcher = watcher_;
  }
  if (watcher) {
    watcher(cause);
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

bool FaultBoard::is_environment() const {
  const std::lock_guard lock(mutex_);
  return is_environment_;
}

void FaultBoard::ThrowIfFailed() const {
  const std::lock_guard lock(mutex_);
  if (is_environment_) {
    throw EnvironmentError(cause_);
  }
  if (failed_) {
    throw RunError(cause_);
  }
}

}  // namespace shardwright
