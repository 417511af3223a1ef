// Expandable segments of the caching allocator: one address range per pool and stream, into which
// pages are mapped where blocks need them. See "Expandable Segments" in
// c10/cuda/CUDACachingAllocator.cpp.
//
// Example: 30 MiB map two pages of 20 MiB, and 10 MiB stay cached. The next 15 MiB begin in these
// 10 MiB and map one more page behind them: 60 MiB reserved, of which 15 are cached. Without
// expandable segments these two requests take segments of 30 and 16 MiB. A request of 40 MiB would
// now begin in the 15 cached ones and map two pages more; separate segments cannot join.

#include <cstdint>
#include <vector>

#include "core/error.h"
#include "core/ranges.h"
#include "core/units.h"
#include "simulator/caching_allocator.h"
#include "simulator/internal/allocator_constants.h"

namespace shardwright {

std::int64_t CachingAllocator::PageSize(std::uint32_t pool) const {
  return IsSmall(pool) ? internal::kSmallSegment : internal::kLargeSegment;
}

// Size of a cached block with the unmapped address space right behind it.
std::int64_t CachingAllocator::ExpandedSize(std::uint32_t block) const {
  const Block& b = blocks_[block];
  const bool can_grow = b.next != kNone && blocks_[b.next].state == BlockState::kUnmapped;
  return b.size + (can_grow ? blocks_[b.next].size : 0);
}

// The lowest place with room for `size`: a run of unmapped and cached blocks that starts with an
// unmapped block or with the cached block right before one. Opens a new range if there is none.
std::uint32_t CachingAllocator::FindExpandable(std::uint32_t pool, std::int64_t size) {
  for (const std::uint32_t unmapped : pools_[pool].unmapped) {
    const std::uint32_t before = blocks_[unmapped].prev;
    const bool starts_before = before != kNone && blocks_[before].state == BlockState::kFree;
    const std::uint32_t first = starts_before ? before : unmapped;
    std::int64_t room = 0;
    for (std::uint32_t b = first; room < size && b != kNone; b = blocks_[b].next) {
      const BlockState state = blocks_[b].state;
      if (state != BlockState::kFree && state != BlockState::kUnmapped) {
        break;
      }
      room += blocks_[b].size;
    }
    if (room >= size) {
      return first;
    }
  }
  // Address space for 9/8 of the memory, so that pages unmapped in the middle leave room at the
  // end.
  const std::int64_t page = PageSize(pool);
  const std::int64_t capacity = options_.capacity.value;
  const std::uint32_t range = AppendSegment(pool, RoundUp(capacity + capacity / 8, page));
  blocks_[range].state = BlockState::kUnmapped;
  InsertUnmapped(range);
  return range;
}

// Maps what a request needs. Returns a block in no list, or kNone when pages run out; what was
// mapped until then stays, cached.
std::uint32_t CachingAllocator::Expand(std::uint32_t pool, std::int64_t size, AllocResult& result) {
  std::uint32_t block = FindExpandable(pool, size);
  if (blocks_[block].state == BlockState::kUnmapped) {
    block = Map(block, std::min(blocks_[block].size, size), result);
  }
  while (block != kNone && blocks_[block].size < size) {
    const std::uint32_t next = blocks_[block].next;
    SW_CHECK(next != kNone && blocks_[next].state == BlockState::kUnmapped);
    block = Map(next, std::min(size - blocks_[block].size, blocks_[next].size), result);
  }
  if (block != kNone) {
    RemoveFree(block);
  }
  return block;
}

// Maps pages for the first `size` bytes of an unmapped block and merges them with cached
// neighbours. Returns the merged cached block, or kNone, with nothing changed, if the device has
// too few pages.
std::uint32_t CachingAllocator::Map(std::uint32_t block, std::int64_t size, AllocResult& result) {
  const std::int64_t mapped = RoundUp(size, PageSize(blocks_[block].pool));
  if (mapped > options_.capacity.value - counters_.reserved.value) {
    return kNone;
  }
  RemoveUnmapped(block);
  if (mapped < blocks_[block].size) {
    const std::uint32_t rest = CutTail(block, mapped);
    blocks_[rest].state = BlockState::kUnmapped;
    InsertUnmapped(rest);
  }
  const std::uint32_t next = blocks_[block].next;
  if (next != kNone && blocks_[next].state == BlockState::kFree) {
    RemoveFree(next);
    AbsorbNext(block);
  }
  const std::uint32_t prev = blocks_[block].prev;
  if (prev != kNone && blocks_[prev].state == BlockState::kFree) {
    RemoveFree(prev);
    AbsorbNext(prev);
    block = prev;
  }
  InsertFree(block);
  counters_.reserved += Bytes(mapped);
  counters_.peak_reserved = std::max(counters_.peak_reserved, counters_.reserved);
  ++counters_.cuda_malloc_count;
  ++result.cuda_malloc_count;
  return block;
}

// Returns the whole pages of a cached block to the driver; what sticks out on both sides stays
// cached. An address range without any page left disappears.
void CachingAllocator::Unmap(std::uint32_t block, AllocResult& result) {
  const std::int64_t pages = Releasable(blocks_[block]);
  if (pages == 0) {
    return;
  }
  RemoveFree(block);
  const std::int64_t address = blocks_[block].address;
  const std::int64_t before = RoundUp(address, PageSize(blocks_[block].pool)) - address;
  if (before + pages < blocks_[block].size) {
    InsertFree(CutTail(block, before + pages));
  }
  if (before > 0) {
    const std::uint32_t middle = CutTail(block, before);
    InsertFree(block);
    block = middle;
  }
  blocks_[block].state = BlockState::kUnmapped;
  const std::uint32_t next = blocks_[block].next;
  if (next != kNone && blocks_[next].state == BlockState::kUnmapped) {
    RemoveUnmapped(next);
    AbsorbNext(block);
  }
  const std::uint32_t prev = blocks_[block].prev;
  if (prev != kNone && blocks_[prev].state == BlockState::kUnmapped) {
    RemoveUnmapped(prev);
    AbsorbNext(prev);
    block = prev;
  }
  counters_.reserved -= Bytes(pages);
  ++counters_.cuda_free_count;
  ++result.segments_freed;
  if (IsSplit(blocks_[block])) {
    InsertUnmapped(block);
  } else {
    ForgetSegment(block);
  }
}

void CachingAllocator::InsertUnmapped(std::uint32_t block) {
  std::vector<std::uint32_t>& list = pools_[blocks_[block].pool].unmapped;
  const auto is_before = [this](std::uint32_t a, std::uint32_t b) {
    return blocks_[a].address < blocks_[b].address;
  };
  list.insert(std::lower_bound(list.begin(), list.end(), block, is_before), block);
}

void CachingAllocator::RemoveUnmapped(std::uint32_t block) {
  std::vector<std::uint32_t>& list = pools_[blocks_[block].pool].unmapped;
  list.erase(FindIn(list, block));
}

}  // namespace shardwright
