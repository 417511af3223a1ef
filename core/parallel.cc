#include "core/parallel.h"

#include <algorithm>
#include <ctime>
#include <exception>
#include <string>

#include <sys/resource.h>

#include "core/error.h"
#include "core/portable.h"
#include "core/threads.h"

namespace shardwright {

const std::atomic<bool>*& StopFlag() {
  thread_local const std::atomic<bool>* flag = nullptr;
  return flag;
}

void ThrowIfStopped() {
  if (const std::atomic<bool>* const flag = StopFlag(); flag != nullptr && flag->load()) {
    throw Interrupted();
  }
}

void FailWithoutThread(const std::system_error& error) {
  const auto limit = [](auto resource, std::int64_t unit, const char* what) {
    rlimit limit{};
    const bool is_set = getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    return is_set ? std::to_string(static_cast<std::int64_t>(limit.rlim_cur) / unit) + what
                  : "unlimited";
  };
  throw EnvironmentError("cannot start a thread: " + error.code().message() +
                         " (ulimit -u: " + limit(RLIMIT_NPROC, 1, " threads of this user") +
                         ", ulimit -v: " + limit(RLIMIT_AS, 1024, " KiB") +
                         ", or a limit of the container)");
}

std::size_t ThreadCount(int wanted) {
  if (!kHasThreads) {
    return 1;
  }
  return wanted > 0 ? static_cast<std::size_t>(wanted)
                    : std::max(1U, std::thread::hardware_concurrency());
}

struct Team::Loop {
  const std::size_t count;
  const std::function<void(std::size_t i, std::size_t worker)>& task;
  std::atomic<std::size_t> next{0};
  std::mutex mutex = {};  // guards `failed` and `failure`
  std::size_t failed = count;
  std::exception_ptr failure = {};

  void Work(std::size_t worker) {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        ThrowIfStopped();
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
  }
  void ThrowFailure() const {
    if (failure) {
      std::rethrow_exception(failure);
    }
  }
};

void ParallelFor(std::size_t count, std::size_t threads,
                 const std::function<void(std::size_t i, std::size_t worker)>& task) {
  Team(kHasThreads ? std::clamp<std::size_t>(threads, 1, std::max<std::size_t>(count, 1)) : 1)
      .For(count, task);
}

namespace {

// How often a thread looks before it sleeps: some 200 microseconds. To wake it takes 20 to 100,
// more than a small op, and steps of a small model are full of such gaps.
constexpr int kLooks = 5000;

template <class Predicate>
bool LookOut(const Predicate& predicate) {
  for (int i = 0; i < kLooks; ++i) {
    if (predicate()) {
      return true;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  return predicate();
}

std::int64_t ThreadNanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

Team::Team(std::size_t threads)
    : threads_(kHasThreads ? std::max<std::size_t>(threads, 1) : 1), memory_(threads_) {}

Team::~Team() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    ++turn_;
    begins_.notify_all();
  }
  for (std::thread& other : others_) {
    other.join();
  }
}

void Team::For(std::size_t count,
               const std::function<void(std::size_t i, std::size_t worker)>& task) {
  Loop loop{count, task};
  const std::unique_lock running(loop_mutex_, std::try_to_lock);
  if (threads_ == 1 || count < 2 || !running.owns_lock()) {
    loop.Work(0);
    loop.ThrowFailure();
    return;
  }
  while (others_.size() + 1 < threads_) {
    others_.push_back(StartThread([this, worker = others_.size() + 1] { Serve(worker); }));
  }
  {
    const std::lock_guard lock(mutex_);
    loop_ = &loop;
    at_work_ = others_.size();
    ++turn_;
    begins_.notify_all();
  }
  loop.Work(0);
  const std::int64_t before = ThreadNanoseconds();
  const auto is_over = [&] { return at_work_ == 0; };
  if (!LookOut(is_over)) {
    std::unique_lock lock(mutex_);
    ends_.wait(lock, is_over);
  }
  nanoseconds_ -= ThreadNanoseconds() - before;  // the caller computed nothing meanwhile
  loop.ThrowFailure();
}

void Team::Serve(std::size_t worker) {
  // The first loop may have begun before this thread did.
  for (std::uint64_t seen = 0;; ++seen) {
    const auto begins = [&] { return turn_ != seen; };
    if (!LookOut(begins)) {
      std::unique_lock lock(mutex_);
      begins_.wait(lock, begins);
    }
    if (stopping_) {
      return;
    }
    const std::int64_t before = ThreadNanoseconds();
    loop_->Work(worker);
    nanoseconds_ += ThreadNanoseconds() - before;
    if (--at_work_ == 0) {
      const std::lock_guard lock(mutex_);
      ends_.notify_all();
    }
  }
}

std::span<std::byte> Team::Memory(std::size_t worker, std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;
  std::vector<std::byte>& memory = memory_[worker];
  if (memory.size() < bytes + kAlignment) {
    memory = std::vector<std::byte>(bytes + kAlignment);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return std::span(memory).subspan((kAlignment - address % kAlignment) % kAlignment, bytes);
}

}  // namespace shardwright
