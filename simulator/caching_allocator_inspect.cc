// Read-outs of the caching allocator's state: the segment list and the fingerprint.
//
// The fingerprint finds the steady state. Example: if the state behind step 5 has the fingerprint
// of the one behind step 4, step 6 and all later ones repeat step 5, and the replay ends
// (reserved.cc).
//
// All that decides future answers enters: sizes and states of the blocks of each pool in order, and
// the time that each pending event still needs. Addresses and the clock do not: a step later the
// same pattern may lie elsewhere. Two different states agree by chance once in 2^64.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "simulator/caching_allocator.h"

namespace shardwright {
namespace {

// One step of a 64-bit hash of a sequence: the finalizer of splitmix64 (public domain, S. Vigna)
// over the state so far and the next word.
std::uint64_t Mix(std::uint64_t hash, std::uint64_t word) {
  std::uint64_t z = hash * 0x9e3779b97f4a7c15u + word + 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

}  // namespace

std::vector<AllocatorSegmentView> CachingAllocator::Segments() const {
  std::vector<AllocatorSegmentView> views;
  for (std::uint32_t head = first_segment_; head != kNone; head = blocks_[head].segment_after) {
    const Block& first = blocks_[head];
    AllocatorSegmentView& view = views.emplace_back();
    view.stream = static_cast<int>(first.pool / 2);
    view.is_small = IsSmall(first.pool);
    for (std::uint32_t i = head; i != kNone; i = blocks_[i].next) {
      const Block& b = blocks_[i];
      view.blocks.push_back(
          {Bytes(b.address - first.address), Bytes(b.size), b.state, BlockHandle(i)});
    }
  }
  return views;
}

std::uint64_t CachingAllocator::Fingerprint(SimTime host_now, std::span<const BlockHandle> live) {
  // One hash per pool, over its segments in address order: how segments of different pools
  // interleave has no influence on the future.
  block_number_.resize(blocks_.size());
  pool_hash_.assign(pools_.size(), 0);
  pool_block_count_.assign(pools_.size(), 0);
  for (std::uint32_t head = first_segment_; head != kNone; head = blocks_[head].segment_after) {
    const std::uint32_t pool = blocks_[head].pool;
    std::uint64_t hash = Mix(pool_hash_[pool], 1);  // a segment starts
    for (std::uint32_t i = head; i != kNone; i = blocks_[i].next) {
      const Block& b = blocks_[i];
      block_number_[i] = pool_block_count_[pool]++;
      // Sizes are multiples of 512 B, so the state fits into the low bits.
      hash = Mix(hash, static_cast<std::uint64_t>(b.size) | static_cast<std::uint64_t>(b.state));
      const bool ages = options_.gc_threshold > 0 && b.state == BlockState::kFree &&
                        !IsSmall(pool) && !IsSplit(b);
      if (ages) {
        hash = Mix(hash, static_cast<std::uint64_t>(search_count_[0] - b.age_base));
      }
    }
    pool_hash_[pool] = hash;
  }
  const auto place = [this](std::uint32_t block) {
    return std::uint64_t{blocks_[block].pool} << 32 | block_number_[block];
  };
  std::uint64_t total = 0;
  for (std::size_t pool = 0; pool < pools_.size(); ++pool) {
    if (pool_block_count_[pool] > 0) {
      total = Mix(Mix(total, pool), pool_hash_[pool]);
    }
  }
  for (std::size_t stream = 0; stream < events_.size(); ++stream) {
    const EventQueue& queue = events_[stream];
    for (std::size_t i = queue.head; i < queue.events.size(); ++i) {
      const Event& event = queue.events[i];
      const std::int64_t left = std::max<std::int64_t>(0, (event.done - host_now).value);
      total = Mix(Mix(Mix(total, stream), place(event.block)), static_cast<std::uint64_t>(left));
    }
  }
  for (const BlockHandle block : live) {
    if (block.valid()) {
      SW_CHECK(block.value < blocks_.size());
      total = Mix(total, place(block.value));
    } else {
      total = Mix(total, ~std::uint64_t{0});
    }
  }
  return total;
}

}  // namespace shardwright
