#include "core/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/portable.h"

namespace shardwright {

std::size_t ThreadCount(int wanted) {
  if (!kHasThreads) {
    return 1;
  }
  return wanted > 0 ? static_cast<std::size_t>(wanted)
                    : std::max(1U, std::thread::hardware_concurrency());
}

void ParallelFor(std::size_t count, std::size_t threads,
                 const std::function<void(std::size_t i, std::size_t worker)>& task) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;  // guards `failed` and `failure`
  std::size_t failed = count;
  std::exception_ptr failure;
  const auto work = [&](std::size_t worker) {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        task(i, worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (i < failed) {
          failed = i;
          failure = std::current_exception();
        }
        next = count;  // all below i have started already
      }
    }
  };
  {
    std::vector<JoiningThread> others;
    for (std::size_t worker = 1; kHasThreads && worker < std::min(threads, count); ++worker) {
      others.emplace_back(work, worker);
    }
    work(0);
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

}  // namespace shardwright
