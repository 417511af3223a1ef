// How fast the running ops of the event loop go. Their speeds change only when the set of running
// ops does.

#include <algorithm>
#include <cmath>

#include "simulator/costs/contention.h"
#include "simulator/internal/event_loop.h"

namespace shardwright::internal {
namespace {

// Speeds of a set of running ops, solved once per set. Valid until the next call.
const Speeds& SpeedsOf(const ContentionModel& model, std::uint64_t key, SpeedCache& cache) {
  constexpr std::size_t kFirstSize = 256;  // real programs have some dozen sets
  if (cache.entries.empty()) {
    cache.entries.resize(kFirstSize);
  }
  if (2 * cache.used >= cache.entries.size()) {
    std::fill(cache.entries.begin(), cache.entries.end(), SpeedCache::Entry());
    cache.used = 0;
  }
  const std::size_t mask = cache.entries.size() - 1;
  std::size_t slot = (key * 0x9e3779b97f4a7c15ULL >> 32) & mask;
  while (cache.entries[slot].key != key) {
    if (cache.entries[slot].key == 0) {
      RunningClasses classes;
      for (std::size_t s = 0; s < kStreamCount; ++s) {
        classes[s] = static_cast<std::uint8_t>(key >> (8 * s));
      }
      cache.entries[slot] = {key, SolveSpeeds(model, classes)};
      ++cache.used;
      break;
    }
    slot = (slot + 1) & mask;
  }
  return cache.entries[slot].speeds;
}

}  // namespace

// Finds the speeds of the present set of running ops.
void EventLoop::FindSpeeds() {
  if (options_.contention && running_key_ != speeds_key_) {
    // Key 0: nothing runs, or only ops without load.
    speeds_ = running_key_ == 0 ? &kFullSpeeds : &SpeedsOf(contention_, running_key_, s_.cache);
    speeds_key_ = running_key_;
  }
}

// Gives every running op the speed that it has in the present set of running ops.
void EventLoop::UpdateSpeeds() {
  FindSpeeds();
  for (const std::size_t stream : Streams(running_streams_)) {
    StreamHead& head = s_.heads[stream];
    if (head.speed == (*speeds_)[stream]) {
      continue;
    }
    const auto passed = static_cast<double>(now_ - head.since);
    head.remaining = std::max(0.0, head.remaining - passed * head.speed);
    head.since = now_;
    head.speed = (*speeds_)[stream];
    const auto left = static_cast<std::int64_t>(std::ceil(head.remaining / head.speed));
    head.time = std::max(now_ + left, head.end_bound);
    head.work_end = now_ + left;
  }
  running_changed_ = false;
}

}  // namespace shardwright::internal
