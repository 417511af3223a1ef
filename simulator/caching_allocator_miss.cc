// Misses of the caching allocator: no cached block fits, so the driver is asked, after making room
// if needed.
//
// Example: 77 GiB of memory, 76 reserved, 2 GiB requested. cudaMalloc of 2 GiB fails. The retry
// waits for all events and returns every segment without a used block, say 5 GiB of them. The
// second cudaMalloc succeeds. The request has cost two calls to cudaMalloc, a cudaFree per segment,
// and a wait for the whole device.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/error.h"
#include "core/units.h"
#include "simulator/caching_allocator.h"
#include "simulator/internal/allocator_constants.h"
#include "simulator/internal/free_list.h"

namespace shardwright {
namespace {

using internal::kLargeSegment;
using internal::kLargestSmallRequest;
using internal::kOwnSegmentGranularity;
using internal::kSmallestOwnSegment;
using internal::kSmallSegment;

// Bytes asked from the driver for a rounded request.
// Example: 700 KiB ask for 2 MiB, 3 MiB for 20 MiB, 11 MiB for 12 MiB.
std::int64_t SegmentSize(std::int64_t size) {
  if (size <= kLargestSmallRequest) {
    return kSmallSegment;
  }
  return size < kSmallestOwnSegment ? kLargeSegment : RoundUp(size, kOwnSegmentGranularity);
}

}  // namespace

// Returns a block in no list, cut to the request; kNone when out of memory.
std::uint32_t CachingAllocator::AllocMiss(std::uint32_t pool, std::int64_t size,
                                          AllocResult& result) {
  if (options_.gc_threshold > 0 && !options_.expandable_segments) {
    CollectGarbage(result);
  }
  std::uint32_t block = NewSegment(pool, size, result);
  if (block == kNone && ReleaseOversize(pool, size, result)) {
    block = NewSegment(pool, size, result);
  }
  if (block == kNone) {
    ++counters_.retry_count;
    result.retried = true;
    SynchronizeAndRelease(result);
    block = NewSegment(pool, size, result);
  }
  if (block != kNone) {
    SplitNew(block, size);
  }
  return block;
}

// Takes memory for a request from the driver: a block in no list that holds at least `size`, or
// kNone if the driver has too little.
std::uint32_t CachingAllocator::NewSegment(std::uint32_t pool, std::int64_t size,
                                           AllocResult& result) {
  if (options_.expandable_segments) {
    return Expand(pool, size, result);
  }
  const std::int64_t segment_size = SegmentSize(size);
  if (segment_size > options_.capacity.value - counters_.reserved.value) {
    return kNone;
  }
  const std::uint32_t block = AppendSegment(pool, segment_size);
  counters_.reserved += Bytes(segment_size);
  counters_.peak_reserved = std::max(counters_.peak_reserved, counters_.reserved);
  ++counters_.cuda_malloc_count;
  ++result.cuda_malloc_count;
  return block;
}

// A segment of one block, above all others.
std::uint32_t CachingAllocator::AppendSegment(std::uint32_t pool, std::int64_t size) {
  const std::uint32_t block = NewBlock();
  Block& b = blocks_[block];
  // Starts at a multiple of both page sizes, so that pages can be found from the address alone.
  static_assert(kLargeSegment % kSmallSegment == 0);
  b.address = RoundUp(next_address_, kLargeSegment);
  SW_CHECK(b.address <= std::numeric_limits<std::int64_t>::max() / 2 - size, "out of addresses");
  b.size = size;
  b.pool = pool;
  next_address_ = b.address + size;
  b.segment_before = last_segment_;
  (last_segment_ == kNone ? first_segment_ : blocks_[last_segment_].segment_after) = block;
  last_segment_ = block;
  return block;
}

// Removes a segment of one block, which must be in no list.
void CachingAllocator::ForgetSegment(std::uint32_t block) {
  const Block& b = blocks_[block];
  (b.segment_before == kNone ? first_segment_ : blocks_[b.segment_before].segment_after) =
      b.segment_after;
  (b.segment_after == kNone ? last_segment_ : blocks_[b.segment_after].segment_before) =
      b.segment_before;
  unused_blocks_.push_back(block);
}

// cudaFree of a segment whose only block is cached.
void CachingAllocator::ReleaseSegment(std::uint32_t block, AllocResult& result) {
  RemoveFree(block);
  counters_.reserved -= Bytes(blocks_[block].size);
  ++counters_.cuda_free_count;
  ++result.segments_freed;
  ForgetSegment(block);
}

// Frees whole large segments that are at least as old as the average, until reserved memory is no
// more than the threshold or nothing is left to free. A pass does not stop when it has freed
// enough.
void CachingAllocator::CollectGarbage(AllocResult& result) {
  const auto threshold = static_cast<std::int64_t>(options_.gc_threshold *
                                                   static_cast<double>(options_.capacity.value));
  const std::int64_t excess = counters_.reserved.value - threshold;
  if (excess <= 0) {
    return;
  }
  std::vector<std::uint32_t>& candidates = scratch_;
  candidates.clear();
  std::int64_t total_age = 0;
  for (std::uint32_t head = first_segment_; head != kNone; head = blocks_[head].segment_after) {
    const Block& b = blocks_[head];
    if (!IsSmall(b.pool) && b.state == BlockState::kFree && !IsSplit(b)) {
      candidates.push_back(head);
      total_age += search_count_[0] - b.age_base;
    }
  }
  std::int64_t reclaimed = 0;
  // Each pass frees at least the oldest candidate, so the loop ends.
  while (reclaimed < excess && !candidates.empty()) {
    const double average = static_cast<double>(total_age) / static_cast<double>(candidates.size());
    std::size_t kept = 0;
    for (const std::uint32_t head : candidates) {
      const std::int64_t age = search_count_[0] - blocks_[head].age_base;
      if (static_cast<double>(age) >= average) {
        total_age -= age;
        reclaimed += blocks_[head].size;
        ReleaseSegment(head, result);
      } else {
        candidates[kept++] = head;
      }
    }
    candidates.resize(kept);
  }
}

// With max_split_size set, frees the smallest cached oversize block that is large enough, or else
// the largest ones until their sum is. Only blocks of the request's stream. False if that was too
// little.
bool CachingAllocator::ReleaseOversize(std::uint32_t pool, std::int64_t size, AllocResult& result) {
  const std::int64_t limit = options_.max_split_size.value;
  if (limit == std::numeric_limits<std::int64_t>::max() || options_.expandable_segments) {
    return false;
  }
  internal::FreeList& list = pools_[pool].free;
  const std::int64_t target = std::max(size, limit);
  const internal::FreeList::Position position = list.LowerBound(target, 0);
  if (position != list.end()) {
    ReleaseSegment(list.at(position).block, result);
    return true;
  }
  std::int64_t released = 0;
  while (released < target && !list.empty() && list.at(list.Last()).size >= limit) {
    const internal::FreeEntry largest = list.at(list.Last());
    released += largest.size;
    ReleaseSegment(largest.block, result);
  }
  return released >= target;
}

// Waits for every pending event, then returns all cached memory that can be returned to the driver.
void CachingAllocator::SynchronizeAndRelease(AllocResult& result) {
  for (EventQueue& queue : events_) {
    for (; queue.head < queue.events.size(); ++queue.head) {
      const Event event = queue.events[queue.head];
      result.sync_until = std::max(result.sync_until, event.done);
      FinishEvent(event);
    }
    queue.events.clear();
    queue.head = 0;
  }
  const Bytes reserved_before = counters_.reserved;
  // Collected first, because releasing changes the lists.
  std::vector<std::uint32_t>& cached = scratch_;
  cached.clear();
  for (const Pool& pool : pools_) {
    for (auto p = pool.free.begin(); p != pool.free.end(); p = pool.free.Next(p)) {
      cached.push_back(pool.free.at(p).block);
    }
  }
  for (const std::uint32_t block : cached) {
    if (options_.expandable_segments) {
      Unmap(block, result);
    } else if (!IsSplit(blocks_[block])) {
      ReleaseSegment(block, result);
    }
  }
  result.freed_by_retry = reserved_before - counters_.reserved;
}

}  // namespace shardwright
