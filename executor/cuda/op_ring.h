#pragma once

// What one rank's host thread has issued last, and what its streams have not finished: told when a
// run fails, by whichever thread finds out, while the rank may hang.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "schedule/program.h"

namespace shardwright {

// Written by the rank's host thread, read by any; names outlive the ring.
class OpRing {
 public:
  void Issue(const std::string& name) {
    const std::uint64_t at = issued_.load(std::memory_order_relaxed);
    recent_[at % kRecent].store(&name, std::memory_order_relaxed);
    issued_.store(at + 1, std::memory_order_release);
  }
  // The oldest op of the stream that is not known to be over, and how many are not; null: none.
  void SetOpen(Stream stream, const std::string* oldest, std::size_t count) {
    Open& open = open_[static_cast<std::size_t>(stream)];
    open.count.store(count, std::memory_order_relaxed);
    open.oldest.store(oldest, std::memory_order_relaxed);
  }

  // "compute: mb0.layers.3.mlp.up.fwd and 2 behind it; issued 417 ops, last a, b, c".
  [[nodiscard]] std::string Describe() const {
    std::string text;
    for (std::size_t s = 0; s < open_.size(); ++s) {
      if (const std::string* const oldest = open_[s].oldest.load(); oldest != nullptr) {
        text += std::string(NameOf(static_cast<Stream>(s))) + ": " + *oldest + " and " +
                std::to_string(open_[s].count.load() - 1) + " behind it; ";
      }
    }
    const std::uint64_t issued = issued_.load(std::memory_order_acquire);
    text +=
        (text.empty() ? "nothing under way; " : "") + ("issued " + std::to_string(issued)) + " ops";
    const std::uint64_t first = issued > kRecent ? issued - kRecent : 0;
    for (std::uint64_t i = first; i < issued; ++i) {
      text += (i == first ? ", last " : ", ") + *recent_[i % kRecent].load();
    }
    return text;
  }

 private:
  static constexpr std::uint64_t kRecent = 8;
  struct Open {
    std::atomic<const std::string*> oldest = nullptr;
    std::atomic<std::size_t> count = 0;
  };
  std::array<std::atomic<const std::string*>, kRecent> recent_ = {};
  std::atomic<std::uint64_t> issued_ = 0;
  std::array<Open, kStreamCount> open_;
};

}  // namespace shardwright
