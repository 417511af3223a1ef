#pragma once

// The cached free blocks of one pool and stream, ordered as best fit needs them.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardwright::internal {

// A cached free block: `block` is its slot in the allocator's block table.
struct FreeEntry {
  std::int64_t size = 0;     // bytes
  std::int64_t address = 0;  // bytes
  std::uint32_t block = 0;
};

// Free blocks sorted by (size, address), so that the first entry at or above (size, 0) is the best
// fit.
//
// A two-level sorted array: chunks of up to kChunkSize entries, and the sorted list of the chunks.
// Up to one chunk, which is the usual number of cached blocks, it is a plain sorted array; above,
// an insertion moves at most a chunk. No host memory is allocated once as many chunks exist as are
// ever needed.
class FreeList {
 public:
  // Place of an entry; invalidated by any change.
  struct Position {
    std::size_t chunk = 0;
    std::size_t index = 0;
    bool operator==(const Position&) const = default;
  };

  [[nodiscard]] bool empty() const { return chunks_.empty(); }
  [[nodiscard]] Position begin() const { return {0, 0}; }
  [[nodiscard]] Position end() const { return {chunks_.size(), 0}; }
  [[nodiscard]] Position Next(Position p) const {
    return p.index + 1 < chunks_[p.chunk].count ? Position{p.chunk, p.index + 1}
                                                : Position{p.chunk + 1, 0};
  }
  // Requires a list that is not empty.
  [[nodiscard]] Position Last() const { return {chunks_.size() - 1, chunks_.back().count - 1}; }
  [[nodiscard]] const FreeEntry& at(Position p) const {
    return entries_[chunks_[p.chunk].first + p.index];
  }

  // The first entry that is not before (size, address), or end().
  [[nodiscard]] Position LowerBound(std::int64_t size, std::int64_t address) const;

  void Insert(const FreeEntry& entry);
  void Erase(Position position);
  // Erases the entry at `position` and inserts `entry`.
  void Replace(Position position, const FreeEntry& entry);
  // Forgets all entries but keeps their memory.
  void Clear();

 private:
  static constexpr std::size_t kChunkSize = 64;

  struct Chunk {
    std::int64_t size = 0;  // key of the chunk's first entry
    std::int64_t address = 0;
    std::size_t first = 0;  // index of the chunk's first entry in entries_
    std::size_t count = 0;  // never 0
  };

  [[nodiscard]] std::size_t ChunkFor(std::int64_t size, std::int64_t address) const;
  [[nodiscard]] std::size_t NewChunkSpace();
  void SplitChunk(std::size_t chunk);
  void UpdateKey(Chunk& chunk) const;
  void DropChunk(std::size_t chunk);

  std::vector<Chunk> chunks_;              // by key
  std::vector<FreeEntry> entries_;         // kChunkSize per chunk, in no order of the chunks
  std::vector<std::size_t> unused_space_;  // values of Chunk::first that no chunk uses
};

}  // namespace shardwright::internal
