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
// A sorted array instead of a tree: a rank rarely caches more than a few hundred blocks per pool
// and stream, where one binary search and one short memmove beat pointer chasing, and nothing is
// allocated once the array has reached its largest size. Each call is O(log n) comparisons and O(n)
// moved bytes.
class FreeList {
 public:
  [[nodiscard]] std::size_t size() const { return entries_.size(); }
  [[nodiscard]] const FreeEntry& at(std::size_t position) const { return entries_[position]; }

  // Position of the first entry that is not before (size, address); size() if there is none.
  [[nodiscard]] std::size_t LowerBound(std::int64_t size, std::int64_t address) const {
    return LowerBoundIn(0, entries_.size(), size, address);
  }

  void Insert(const FreeEntry& entry);
  void Erase(std::size_t position);
  // Erases the entry at `position` and inserts `entry`, moving only what lies between the two
  // places.
  void Replace(std::size_t position, const FreeEntry& entry);
  // Forgets all entries but keeps their memory.
  void Clear() { entries_.clear(); }

 private:
  [[nodiscard]] std::size_t LowerBoundIn(std::size_t begin, std::size_t end, std::int64_t size,
                                         std::int64_t address) const;

  std::vector<FreeEntry> entries_;
};

}  // namespace shardwright::internal
