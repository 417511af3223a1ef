// Hits of the caching allocator, frees and merges; caching_allocator_miss.cc asks the driver.
//
// Example, one stream, sizes in MiB:
//
//   Alloc 3    no block: a segment of 20; the block of 3 is cut off, 17 are cached
//   Alloc 12   best fit 17: 12 are cut off, 5 are cached
//   Alloc 8    5 are too few: a second segment of 20, 12 are cached; 40 are reserved
//   Free 3     its neighbour of 12 is in use, so 3, 5 and 12 are cached
//   Alloc 4    best fit 5. The rest of 1 is not above 1 MiB, so the whole block of 5 is handed out
//
// At most 24 MiB are in use, as the program asked for them, and 40 MiB are reserved. The difference
// is fragmentation.

#include "simulator/caching_allocator.h"

#include <algorithm>
#include <string>

#include "simulator/internal/allocator_constants.h"

namespace shardwright {
namespace {

using internal::FreeList;
using internal::kBlockGranularity;
using internal::kLargeSegment;
using internal::kLargestCapacity;
using internal::kLargestRequest;
using internal::kLargestSmallRequest;
using internal::kMaxStreams;

bool IsValidCapacity(Bytes b) {
  return b.value > 0 && b.value <= kLargestCapacity;
}
bool IsValidMaxSplitSize(Bytes b) {
  return b.value > kLargeSegment;
}
bool IsValidThreshold(double t) {
  return t >= 0 && t < 1;
}

}  // namespace

CachingAllocator::CachingAllocator(const AllocatorOptions& options) : options_(options) {
  SW_CHECK(IsValidCapacity(options.capacity), std::to_string(options.capacity.value));
  SW_CHECK(IsValidMaxSplitSize(options.max_split_size),
           std::to_string(options.max_split_size.value));
  SW_CHECK(IsValidThreshold(options.gc_threshold), std::to_string(options.gc_threshold));
}

AllocResult CachingAllocator::Alloc(Bytes size, int stream, SimTime host_now) {
  SW_CHECK(size.value >= 0 && size.value <= kLargestRequest, std::to_string(size.value) + " B");
  AllocResult result;
  result.sync_until = host_now;
  if (size.value == 0) {
    return result;
  }
  if (pending_event_count_ > 0) {
    PollEvents(host_now);
  }
  EnsureStream(stream);
  const std::int64_t need = RoundUp(size.value, kBlockGranularity);
  const bool is_small = need <= kLargestSmallRequest;
  const std::uint32_t pool = 2 * static_cast<std::uint32_t>(stream) + (is_small ? 1 : 0);
  if (options_.gc_threshold > 0) {
    ++search_count_[is_small ? 1 : 0];
  }
  const FreeList::Position position = FindFit(pools_[pool], need);
  const std::uint32_t block = position != pools_[pool].free.end()
                                  ? TakeFit(pools_[pool], position, need)
                                  : AllocMiss(pool, need, result);
  if (block == kNone) {
    result.out_of_memory = true;
    ++counters_.out_of_memory_count;
    return result;
  }
  Block& b = blocks_[block];
  b.state = BlockState::kAllocated;
  counters_.allocated += Bytes(b.size);
  counters_.active += Bytes(b.size);
  counters_.peak_allocated = std::max(counters_.peak_allocated, counters_.allocated);
  counters_.peak_active = std::max(counters_.peak_active, counters_.active);
  result.block = BlockHandle(block);
  return result;
}

void CachingAllocator::Free(BlockHandle block, std::span<const PendingUse> uses) {
  if (!block.valid()) {
    return;
  }
  SW_CHECK(block.value < blocks_.size() && blocks_[block.value].state == BlockState::kAllocated,
           "block " + std::to_string(block.value) + " is not allocated");
  Block& b = blocks_[block.value];
  counters_.allocated -= Bytes(b.size);
  const int owner = static_cast<int>(b.pool / 2);
  for (const PendingUse& use : uses) {
    if (use.stream == owner) {
      continue;
    }
    EnsureStream(use.stream);
    events_[static_cast<std::size_t>(use.stream)].events.push_back({use.done, block.value});
    ++b.event_count;
    ++pending_event_count_;
  }
  if (b.event_count > 0) {
    b.state = BlockState::kWaiting;
  } else {
    Recycle(block.value);
  }
}

Bytes CachingAllocator::SizeOf(BlockHandle block) const {
  SW_CHECK(block.value < blocks_.size(), "block " + std::to_string(block.value));
  return Bytes(blocks_[block.value].size);
}

void CachingAllocator::ResetPeaks() {
  counters_.peak_allocated = counters_.allocated;
  counters_.peak_active = counters_.active;
  counters_.peak_reserved = counters_.reserved;
}

void CachingAllocator::Reset() {
  counters_ = {};
  blocks_.clear();
  unused_blocks_.clear();
  first_segment_ = last_segment_ = kNone;
  for (Pool& pool : pools_) {
    pool.free.Clear();
    pool.unmapped.clear();
  }
  for (EventQueue& queue : events_) {
    queue.events.clear();
    queue.head = 0;
  }
  pending_event_count_ = 0;
  next_address_ = 0;
  search_count_ = {};
}

void CachingAllocator::EnsureStream(int stream) {
  SW_CHECK(stream >= 0 && stream < kMaxStreams, "stream " + std::to_string(stream));
  const std::size_t count = static_cast<std::size_t>(stream) + 1;
  if (events_.size() < count) {
    events_.resize(count);
    pools_.resize(2 * count);
  }
}

std::uint32_t CachingAllocator::NewBlock() {
  if (unused_blocks_.empty()) {
    blocks_.emplace_back();
    return static_cast<std::uint32_t>(blocks_.size() - 1);
  }
  const std::uint32_t block = unused_blocks_.back();
  unused_blocks_.pop_back();
  blocks_[block] = Block();
  return block;
}

// Shortens a block to `size` and returns a new free block, in no list, for what lies behind. The
// front keeps its slot, so that the first slot of a segment never changes.
// Cut to 3 MiB, a block of 20 MiB leaves a new one of 17 MiB behind it.
std::uint32_t CachingAllocator::CutTail(std::uint32_t block, std::int64_t size) {
  const std::uint32_t tail = NewBlock();
  Block& front = blocks_[block];
  Block& back = blocks_[tail];
  back.address = front.address + size;
  back.size = front.size - size;
  back.pool = front.pool;
  back.prev = block;
  back.next = front.next;
  if (front.next != kNone) {
    blocks_[front.next].prev = tail;
  }
  front.next = tail;
  front.size = size;
  return tail;
}

// Joins a block with the one behind it, which must be in no list.
void CachingAllocator::AbsorbNext(std::uint32_t block) {
  Block& front = blocks_[block];
  const std::uint32_t gone = front.next;
  front.size += blocks_[gone].size;
  front.next = blocks_[gone].next;
  if (front.next != kNone) {
    blocks_[front.next].prev = block;
  }
  unused_blocks_.push_back(gone);
}

// Position of the cached block that serves the request, or end() of the list.
FreeList::Position CachingAllocator::FindFit(const Pool& pool, std::int64_t size) const {
  const FreeList& list = pool.free;
  FreeList::Position position = list.LowerBound(size, 0);
  if (position == list.end()) {
    return position;
  }
  if (options_.expandable_segments) {
    // A block before unmapped address space counts with the size to which it can grow, so that a
    // closed gap is preferred to it. Only direct successors are compared, as PyTorch does.
    for (FreeList::Position next = list.Next(position);
         next != list.end() &&
         ExpandedSize(list.at(next).block) < ExpandedSize(list.at(position).block);
         next = list.Next(next)) {
      position = next;
    }
  }
  // Only the best fit is looked at: if it breaks the oversize rule, the search has failed.
  const std::int64_t limit = options_.max_split_size.value;
  const std::int64_t found = list.at(position).size;
  const bool is_refused = size < limit ? found >= limit : found >= size + kLargeSegment;
  return is_refused ? list.end() : position;
}

bool CachingAllocator::ShouldSplit(const Block& block, std::int64_t size) const {
  const std::int64_t rest = block.size - size;
  if (IsSmall(block.pool) || options_.expandable_segments) {
    return rest >= kBlockGranularity;
  }
  return size < options_.max_split_size.value && rest > kLargestSmallRequest;
}

// Cuts what a request leaves over off a block that is in no list.
void CachingAllocator::SplitNew(std::uint32_t block, std::int64_t size) {
  if (ShouldSplit(blocks_[block], size)) {
    InsertFree(CutTail(block, size));
  }
}

// Takes the cached block at `position` for a request of `size` and caches the rest.
std::uint32_t CachingAllocator::TakeFit(Pool& pool, FreeList::Position position,
                                        std::int64_t size) {
  const std::uint32_t block = pool.free.at(position).block;
  if (!ShouldSplit(blocks_[block], size)) {
    pool.free.Erase(position);
    return block;
  }
  const std::uint32_t rest = CutTail(block, size);
  const Block& r = blocks_[rest];  // never a whole segment, so it needs no age
  pool.free.Replace(position, {r.size, r.address, rest});
  return block;
}

// Bytes of whole pages in a cached block of an expandable segment: what a retry would return.
std::int64_t CachingAllocator::Releasable(const Block& block) const {
  const std::int64_t page = PageSize(block.pool);
  const std::int64_t begin = RoundUp(block.address, page);
  const std::int64_t end = (block.address + block.size) / page * page;
  return std::max<std::int64_t>(0, end - begin);
}

void CachingAllocator::InsertFree(std::uint32_t block) {
  Block& b = blocks_[block];
  b.state = BlockState::kFree;
  b.age_base = search_count_[b.pool & 1u];
  pools_[b.pool].free.Insert({b.size, b.address, block});
}

void CachingAllocator::RemoveFree(std::uint32_t block) {
  const Block& b = blocks_[block];
  FreeList& list = pools_[b.pool].free;
  list.Erase(list.LowerBound(b.size, b.address));
}

// Merges a block that nobody uses any more with its free neighbours and caches the result.
void CachingAllocator::Recycle(std::uint32_t block) {
  Block* b = &blocks_[block];
  counters_.active -= Bytes(b->size);
  FreeList& list = pools_[b->pool].free;
  const bool joins_prev = b->prev != kNone && blocks_[b->prev].state == BlockState::kFree;
  const bool joins_next = b->next != kNone && blocks_[b->next].state == BlockState::kFree;
  if (joins_prev && joins_next) {
    RemoveFree(b->next);
  }
  if (!joins_prev && !joins_next) {
    InsertFree(block);
    return;
  }
  // One neighbour's list entry becomes the entry of the merged block.
  const Block& neighbour = blocks_[joins_prev ? b->prev : b->next];
  const FreeList::Position position = list.LowerBound(neighbour.size, neighbour.address);
  if (joins_next) {
    AbsorbNext(block);
  }
  if (joins_prev) {
    block = b->prev;
    b = &blocks_[block];
    AbsorbNext(block);
  }
  b->state = BlockState::kFree;
  b->age_base = search_count_[b->pool & 1u];
  list.Replace(position, {b->size, b->address, block});
}

// Notices finished events. Each stream's events are looked at in order of the frees, up to the
// first unfinished one: a finished event behind it stays unnoticed.
void CachingAllocator::PollEvents(SimTime host_now) {
  for (EventQueue& queue : events_) {
    while (queue.head < queue.events.size() && queue.events[queue.head].done <= host_now) {
      FinishEvent(queue.events[queue.head]);
      ++queue.head;
    }
    // Drop the finished part once it is at least half, so that each event is moved at most once on
    // average.
    if (queue.head > 0 && 2 * queue.head >= queue.events.size()) {
      queue.events.erase(queue.events.begin(),
                         queue.events.begin() + static_cast<std::ptrdiff_t>(queue.head));
      queue.head = 0;
    }
  }
}

void CachingAllocator::FinishEvent(const Event& event) {
  --pending_event_count_;
  if (--blocks_[event.block].event_count == 0) {
    Recycle(event.block);
  }
}

}  // namespace shardwright
