#pragma once

// A loop whose iterations several threads share.

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace shardwright {

// `wanted`; 0: as many as the machine runs at a time. At least 1.
[[nodiscard]] std::size_t ThreadCount(int wanted = 0);

// Calls task(i, worker) for i in [0, count), in rising order of their starts, on the calling thread
// and up to `threads` - 1 others; `worker` < `threads` is the same for the calls of one thread.
// Returns when all are done. When tasks throw, no further ones start, and the exception of the
// lowest i is rethrown: the same one for any number of threads.
void ParallelFor(std::size_t count, std::size_t threads,
                 const std::function<void(std::size_t i, std::size_t worker)>& task);

// Threads for one caller's many short loops: they wait from one loop to the next, a moment at work
// and then asleep.
class Team {
 public:
  // The caller counts as one of `threads`; the others start with the first loop.
  explicit Team(std::size_t threads);
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team();

  [[nodiscard]] std::size_t threads() const { return threads_; }

  // As ParallelFor on these threads; on the calling thread alone while another thread's loop runs.
  void For(std::size_t count, const std::function<void(std::size_t i, std::size_t worker)>& task);

  // At least `bytes` of arbitrary content, 64-byte aligned, that `worker` keeps from one loop to
  // the next. Called by that worker.
  [[nodiscard]] std::span<std::byte> Memory(std::size_t worker, std::size_t bytes);

  // Time on a core, since this was asked last, that the caller does not know of: what the other
  // threads computed in loops, less what the caller spent looking whether they had ended.
  [[nodiscard]] std::int64_t TakeNanoseconds() { return nanoseconds_.exchange(0); }

 private:
  struct Loop;
  void Serve(std::size_t worker);

  const std::size_t threads_;
  std::vector<std::vector<std::byte>> memory_;  // one per thread
  std::atomic<std::int64_t> nanoseconds_{0};
  std::mutex loop_mutex_;  // held by whose loop runs
  // Which loop: counts up with every one.
  std::atomic<std::uint64_t> turn_{0};
  std::atomic<std::size_t> at_work_{0};  // others that have not ended the loop
  Loop* loop_ = nullptr;                 // written before turn_ counts up
  bool stopping_ = false;                // likewise
  std::mutex mutex_;                     // of the two below
  std::condition_variable begins_, ends_;
  std::vector<std::thread> others_;
};

}  // namespace shardwright
