#include "simulator/internal/free_list.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace shardwright::internal {

std::size_t FreeList::LowerBoundIn(std::size_t begin, std::size_t end, std::int64_t size,
                                   std::int64_t address) const {
  // Halving without a data-dependent jump: the outcome of each comparison is close to random, so a
  // branch would be mispredicted every second time.
  const FreeEntry* base = entries_.data() + begin;
  std::size_t count = end - begin;
  while (count > 0) {
    const std::size_t half = (count + 1) / 2;
    const FreeEntry& probe = base[half - 1];
    const bool is_before = (probe.size < size) | ((probe.size == size) & (probe.address < address));
    base += is_before ? half : 0;
    count = is_before ? count - half : half - 1;
  }
  return static_cast<std::size_t>(base - entries_.data());
}

void FreeList::Insert(const FreeEntry& entry) {
  const std::size_t position = LowerBound(entry.size, entry.address);
  entries_.insert(entries_.begin() + static_cast<std::ptrdiff_t>(position), entry);
}

void FreeList::Erase(std::size_t position) {
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(position));
}

void FreeList::Replace(std::size_t position, const FreeEntry& entry) {
  const FreeEntry& old = entries_[position];
  const bool moves_up =
      old.size < entry.size || (old.size == entry.size && old.address < entry.address);
  const auto at = [this](std::size_t i) {
    return entries_.begin() + static_cast<std::ptrdiff_t>(i);
  };
  if (moves_up) {
    const std::size_t target =
        LowerBoundIn(position + 1, entries_.size(), entry.size, entry.address);
    std::move(at(position + 1), at(target), at(position));
    entries_[target - 1] = entry;
  } else {
    const std::size_t target = LowerBoundIn(0, position, entry.size, entry.address);
    std::move_backward(at(target), at(position), at(position + 1));
    entries_[target] = entry;
  }
}

}  // namespace shardwright::internal
