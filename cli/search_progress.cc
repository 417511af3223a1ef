#include "cli/search_progress.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include <unistd.h>

#include "core/json.h"
#include "core/printable.h"
#include "core/threads.h"

namespace shardwright {
namespace {

class SearchTeller {
 public:
  SearchTeller(bool ticks, const std::string& name)
      : on_terminal_(::isatty(STDERR_FILENO) == 1), name_(name.empty() ? "" : name + ": ") {
    if (ticks && !on_terminal_) {
      ticker_ = StartThread<std::jthread>([this](const std::stop_token& end) { Tick(end); });
    }
  }
  ~SearchTeller() {
    if (on_terminal_ && was_shown_) {
      SayLines("\n");
    }
  }
  SearchTeller(const SearchTeller&) = delete;
  SearchTeller& operator=(const SearchTeller&) = delete;

  void Tell(const SearchProgress& progress) {
    const std::string best = progress.best.value > 0 ? Format(progress.best) : "none fits";
    const std::lock_guard lock(mutex_);
    text_ = name_ + std::to_string(progress.simulated) + " plans simulated, fastest tried " + best +
            ", none below " + Format(progress.lower_bound);
    if (on_terminal_) {
      SayProgress(text_ + "   ");
      was_shown_ = true;
    }
  }

 private:
  void Tick(const std::stop_token& end) {
    constexpr std::chrono::seconds kPause(10);
    std::unique_lock lock(mutex_);
    for (std::int64_t ticks = 1; !wake_.wait_for(lock, end, kPause, [] { return false; });
         ++ticks) {
      if (end.stop_requested()) {
        return;
      }
      SayLines("searching for " + std::to_string(ticks * kPause.count()) + " s: " + text_ + "\n");
    }
  }

  const bool on_terminal_;
  const std::string name_;
  bool was_shown_ = false;
  std::mutex mutex_;
  std::condition_variable_any wake_;
  std::string text_ = "measuring the model";
  std::jthread ticker_;  // the last member: it ends first
};

}  // namespace

std::function<void(const SearchProgress&)> ProgressLines(bool ticks, const std::string& name) {
  return [lines = std::make_shared<SearchTeller>(ticks, name)](const SearchProgress& progress) {
    lines->Tell(progress);
  };
}

}  // namespace shardwright
