// The sorted list of cached blocks, as chunks of up to 64 entries.
//
// Example: 100 blocks lie in a few chunks. LowerBound searches the chunks' first keys, then one
// chunk: about 2 + 6 comparisons. An insertion moves at most 63 entries. A std::set would allocate
// a node for each insertion, and this list is in the inner loop of all replays.

#include "simulator/internal/free_list.h"

#include <algorithm>

namespace shardwright::internal {
namespace {

// How many of the `count` sorted items come before the key. Halves without a data-dependent jump:
// the outcome of each comparison is close to random, so a branch would be mispredicted every second
// time.
template <class Item>
std::size_t CountBefore(const Item* items, std::size_t count, std::int64_t size,
                        std::int64_t address) {
  const Item* base = items;
  while (count > 0) {
    const std::size_t half = (count + 1) / 2;
    const Item& probe = base[half - 1];
    const bool is_before = (probe.size < size) | ((probe.size == size) & (probe.address < address));
    base += is_before ? half : 0;
    count = is_before ? count - half : half - 1;
  }
  return static_cast<std::size_t>(base - items);
}

}  // namespace

// The chunk that holds the place of a key: the last one that begins before it, or the first.
std::size_t FreeList::ChunkFor(std::int64_t size, std::int64_t address) const {
  const std::size_t before = CountBefore(chunks_.data(), chunks_.size(), size, address);
  return before > 0 ? before - 1 : 0;
}

FreeList::Position FreeList::LowerBound(std::int64_t size, std::int64_t address) const {
  if (chunks_.empty()) {
    return end();
  }
  const std::size_t c = ChunkFor(size, address);
  const Chunk& chunk = chunks_[c];
  const std::size_t index = CountBefore(&entries_[chunk.first], chunk.count, size, address);
  return index < chunk.count ? Position{c, index} : Position{c + 1, 0};
}

void FreeList::Insert(const FreeEntry& entry) {
  if (chunks_.empty()) {
    chunks_.push_back({entry.size, entry.address, NewChunkSpace(), 0});
  }
  std::size_t c = ChunkFor(entry.size, entry.address);
  if (chunks_[c].count == kChunkSize) {
    SplitChunk(c);
    c = ChunkFor(entry.size, entry.address);
  }
  Chunk& chunk = chunks_[c];
  FreeEntry* first = &entries_[chunk.first];
  const std::size_t index = CountBefore(first, chunk.count, entry.size, entry.address);
  std::move_backward(first + index, first + chunk.count, first + chunk.count + 1);
  first[index] = entry;
  ++chunk.count;
  UpdateKey(chunk);
}

void FreeList::Erase(Position position) {
  Chunk& chunk = chunks_[position.chunk];
  FreeEntry* first = &entries_[chunk.first];
  std::move(first + position.index + 1, first + chunk.count, first + position.index);
  --chunk.count;
  if (chunk.count == 0) {
    DropChunk(position.chunk);
    return;
  }
  UpdateKey(chunk);
  // Chunks that have shrunk join, so that their number stays in proportion to the entries. Half a
  // chunk is left free, so that the next insertion does not split it again.
  if (position.chunk + 1 < chunks_.size()) {
    const Chunk& next = chunks_[position.chunk + 1];
    if (chunk.count + next.count <= kChunkSize / 2) {
      std::copy_n(&entries_[next.first], next.count, first + chunk.count);
      chunk.count += next.count;
      DropChunk(position.chunk + 1);
    }
  }
}

void FreeList::Replace(Position position, const FreeEntry& entry) {
  if (ChunkFor(entry.size, entry.address) != position.chunk) {
    Erase(position);
    Insert(entry);
    return;
  }
  // The entry stays in its chunk: only what lies between the two places moves.
  Chunk& chunk = chunks_[position.chunk];
  FreeEntry* first = &entries_[chunk.first];
  const std::size_t index = CountBefore(first, chunk.count, entry.size, entry.address);
  if (index > position.index) {
    std::move(first + position.index + 1, first + index, first + position.index);
    first[index - 1] = entry;
  } else {
    std::move_backward(first + index, first + position.index, first + position.index + 1);
    first[index] = entry;
  }
  UpdateKey(chunk);
}

void FreeList::Clear() {
  for (const Chunk& chunk : chunks_) {
    unused_space_.push_back(chunk.first);
  }
  chunks_.clear();
}

std::size_t FreeList::NewChunkSpace() {
  if (unused_space_.empty()) {
    entries_.resize(entries_.size() + kChunkSize);
    return entries_.size() - kChunkSize;
  }
  const std::size_t first = unused_space_.back();
  unused_space_.pop_back();
  return first;
}

// Moves the upper half of a full chunk into a new one behind it.
void FreeList::SplitChunk(std::size_t chunk) {
  constexpr std::size_t kKept = kChunkSize / 2;
  const std::size_t space = NewChunkSpace();
  Chunk& lower = chunks_[chunk];
  std::copy_n(&entries_[lower.first + kKept], kChunkSize - kKept, &entries_[space]);
  lower.count = kKept;
  Chunk upper{0, 0, space, kChunkSize - kKept};
  UpdateKey(upper);
  chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(chunk) + 1, upper);
}

void FreeList::UpdateKey(Chunk& chunk) const {
  chunk.size = entries_[chunk.first].size;
  chunk.address = entries_[chunk.first].address;
}

void FreeList::DropChunk(std::size_t chunk) {
  unused_space_.push_back(chunks_[chunk].first);
  chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(chunk));
}

}  // namespace shardwright::internal
