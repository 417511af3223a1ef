#pragma once

// The ops that one rank's host thread has issued last, and those that its streams have not
// finished. They are told when a run fails, by the thread that finds out, while the rank may hang.
//
// Example: a run stops, and rank 3 tells "under way: gather: mb0.layers.4.gather and 1 behind it;
// issued 417 ops, last ...". The gather stream stands in layer 4, so a peer may be missing there.

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "schedule/program.h"

namespace shardwright {

// Written by the rank's host thread, read by any; names outlive the ring. Nobody hangs while it
// holds the lock.
// Cost: one lock per op, and 8 pointers of memory, whatever the length of the run.
class OpRing {
 public:
  void Issue(const std::string& name) {
    const std::lock_guard lock(mutex_);
    recent_[issued_ % kRecent] = &name;
    ++issued_;
  }
  // The oldest op of the stream that is not known to be over, and how many are not; null: none.
  void SetOpen(Stream stream, const std::string* oldest, std::size_t count) {
    const std::lock_guard lock(mutex_);
    open_[static_cast<std::size_t>(stream)] = {oldest, count};
  }

  // "under way: compute: mb0.layers.3.mlp.up.fwd and 2 behind it", or "nothing under way".
  [[nodiscard]] std::string DescribeOpen() const {
    const std::lock_guard lock(mutex_);
    return OpenText();
  }
  // That, and "; issued 417 ops, last a, b, c".
  [[nodiscard]] std::string Describe() const {
    const std::lock_guard lock(mutex_);
    std::string text = OpenText() + "; issued " + std::to_string(issued_) + " ops";
    const std::uint64_t first = issued_ > kRecent ? issued_ - kRecent : 0;
    for (std::uint64_t i = first; i < issued_; ++i) {
      text += (i == first ? ", last " : ", ") + *recent_[i % kRecent];
    }
    return text;
  }

 private:
  static constexpr std::uint64_t kRecent = 8;
  struct Open {
    const std::string* oldest = nullptr;
    std::size_t count = 0;
  };

  [[nodiscard]] std::string OpenText() const {
    std::string text;
    for (std::size_t s = 0; s < open_.size(); ++s) {
      if (const auto& [oldest, count] = open_[s]; oldest != nullptr) {
        text += (text.empty() ? "under way: " : "; ") +
                std::string(NameOf(static_cast<Stream>(s))) + ": " + *oldest + " and " +
                std::to_string(count - 1) + " behind it";
      }
    }
    return text.empty() ? "nothing under way" : text;
  }

  mutable std::mutex mutex_;  // guards all below
  std::array<const std::string*, kRecent> recent_ = {};
  std::uint64_t issued_ = 0;
  std::array<Open, kStreamCount> open_;
};

}  // namespace shardwright
