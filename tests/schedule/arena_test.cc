// PackArena against a search cell by cell.

#include "schedule/internal/arena.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();

std::size_t IndexOf(Stream stream) {
  return static_cast<std::size_t>(stream);
}

// One byte of the arena.
struct Cell {
  std::size_t holder = kNone;  // the last item on it
  std::size_t first = kNone;   // the first one
};

// What arena.h says, byte by byte, of items so small that all bytes can be listed.
class PlainPacker {
 public:
  PlainPacker(std::vector<ArenaItem>& items, std::int64_t base) : items_(items), base_(base) {}

  std::int64_t Run() {
    int levels = 0;
    for (const ArenaItem& item : items_) {
      levels = std::max(levels, item.level);
    }
    for (int level = 0; level <= levels; ++level) {
      cells_.clear();
      for (const ArenaItem& item : items_) {
        const bool is_fixed = item.level < level && item.birth >= 0;
        end_ = is_fixed ? std::max(end_, item.offset + item.size) : end_;
      }
      for (std::size_t i = 0; i < items_.size(); ++i) {
        ArenaItem& item = items_[i];
        if (item.level > level) {
          continue;
        }
        if (item.offset < 0) {
          item.offset = Find(i, level);
          end_ = std::max(end_, item.offset + item.size);
        }
        for (std::int64_t b = item.offset; b < item.offset + item.size; ++b) {
          Cell& cell = At(b);
          cell.first = cell.first == kNone ? i : cell.first;
          cell.holder = i;
        }
      }
    }
    return std::max(base_, end_);
  }

 private:
  Cell& At(std::int64_t byte) {
    const auto index = static_cast<std::size_t>(byte - base_);
    cells_.resize(std::max(cells_.size(), index + 1));
    return cells_[index];
  }

  // May item i take this byte?
  bool IsFree(std::size_t i, std::int64_t byte) {
    const ArenaItem& item = items_[i];
    const Cell cell = At(byte);
    if (cell.holder != kNone && items_[cell.holder].release[IndexOf(item.stream)] > item.birth) {
      return false;
    }
    return cell.first == kNone || item.precedes_next_run || items_[cell.first].follows_last_run ||
           items_[cell.first].before_next_birth.Covers(item.last);
  }

  // Must item i keep clear of one that has its place already and is born later?
  bool IsInWay(std::size_t i, std::size_t later, int level) {
    const ArenaItem& item = items_[i];
    const ArenaItem& other = items_[later];
    if (later <= i || other.level >= level || other.birth < 0) {
      return false;
    }
    return other.birth < item.release[IndexOf(other.stream)] ||
           (!item.follows_last_run && !other.precedes_next_run &&
            !item.before_next_birth.Covers(other.last));
  }

  std::int64_t Find(std::size_t i, int level) {
    // Far enough for one more item behind everything.
    std::int64_t limit = base_ + 1;
    for (const ArenaItem& item : items_) {
      limit = std::max(limit, item.offset) + item.size;
    }
    std::vector<bool> free;
    std::set<std::int64_t> cuts;  // where an item without bytes lies
    for (std::int64_t b = base_; b <= limit; ++b) {
      free.push_back(IsFree(i, b));
    }
    for (std::size_t k = 0; k < items_.size(); ++k) {
      if (IsInWay(i, k, level)) {
        const ArenaItem& other = items_[k];
        std::fill_n(free.begin() + other.offset - base_, other.size, false);
        if (other.size == 0) {
          cuts.insert(other.offset);
        }
      }
    }
    std::int64_t best = -1;
    constexpr std::int64_t kEndless = std::numeric_limits<std::int64_t>::max();
    std::int64_t best_room = kEndless;
    for (std::int64_t begin = base_; begin <= limit;) {
      std::int64_t end = begin;
      while (end <= limit && free[static_cast<std::size_t>(end - base_)] &&
             (end == begin || !cuts.contains(end))) {
        ++end;
      }
      const std::int64_t size = items_[i].size;
      const bool has_end = end <= limit;
      // Without an end, only what lies below the highest byte so far is free of charge.
      const std::int64_t room = has_end                ? end - begin
                                : begin + size <= end_ ? end_ - begin
                                                       : kEndless;
      const bool fits = end > begin && (!has_end || end - begin >= size);
      if (fits && (best < 0 || room < best_room)) {
        best = begin;
        best_room = room;
      }
      begin = std::max(end, begin + 1);
    }
    return best;
  }

  std::vector<ArenaItem>& items_;
  std::int64_t base_;
  std::int64_t end_ = 0;
  std::vector<Cell> cells_;
};

class RandomItems {
 public:
  explicit RandomItems(unsigned seed) : rng_(seed) {}

  std::vector<ArenaItem> Draw(std::int64_t base) {
    const int streams = Number(1, 3);
    const int count = Number(1, 40);
    const bool has_order = Number(0, 2) > 0;  // every life comes before the next run
    std::vector<ArenaItem> items;
    for (int i = 0; i < count; ++i) {
      ArenaItem& item = items.emplace_back();
      item.birth = Number(-1, 30);
      item.level = item.birth < 0 ? 0 : Number(0, 4);
      item.size = Number(0, 9);
      item.offset = item.level == 0 ? base + Number(0, 60) : -1;
      item.stream = static_cast<Stream>(Number(0, streams - 1));
      item.last_use = item.birth + Number(0, 12);
      for (std::int32_t& release : item.release) {
        release = Number(0, 4) == 0 ? ArenaItem::kNever : item.last_use + Number(1, 6);
      }
      item.precedes_next_run = has_order || Number(0, 2) > 0;
      item.follows_last_run = has_order || Number(0, 2) > 0;
      for (std::size_t s = 0; s < 3; ++s) {
        item.last.count[s] = Number(0, 3);
        item.before_next_birth.count[s] = Number(0, 4);
      }
    }
    std::stable_sort(items.begin(), items.end(),
                     [](const ArenaItem& a, const ArenaItem& b) { return a.birth < b.birth; });
    return items;
  }

 private:
  int Number(int least, int most) { return std::uniform_int_distribution(least, most)(rng_); }

  std::mt19937 rng_;
};

TEST_CASE("PackArena: as a search cell by cell") {
  for (unsigned seed = 0; seed < 3'000; ++seed) {
    CAPTURE(seed);
    const std::int64_t base = seed % 7;
    std::vector<ArenaItem> items = RandomItems(seed).Draw(base);
    std::vector<ArenaItem> plain = items;
    const std::int64_t end = PackArena(items, base);
    CHECK(end == PlainPacker(plain, base).Run());
    for (std::size_t i = 0; i < items.size(); ++i) {
      CAPTURE(i);
      REQUIRE(items[i].offset == plain[i].offset);
    }
  }
}

// A chain of layers: each keeps something from forward to its backward, in the opposite order.
double SecondsOf(std::int32_t layers) {
  std::vector<ArenaItem> items;
  for (std::int32_t k = 0; k < 2 * layers; ++k) {
    const bool is_kept = k < layers;
    for (const std::int64_t size : {256, 512}) {
      ArenaItem& item = items.emplace_back();
      item.level = 1;
      item.size = size * (1 + k % 3);
      item.birth = 2 * k;
      item.last_use = is_kept && size == 512 ? 2 * (2 * layers - k) : 2 * k + 1;
      item.release.fill(item.last_use + 1);
    }
  }
  const std::clock_t begin = std::clock();
  PackArena(items, 0);
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

TEST_CASE("PackArena: time grows with the number of lives, not with its square") {
  constexpr std::int32_t kLayers = 20'000;
  constexpr std::int32_t kTimes = 8;
  SecondsOf(kLayers);
  const double few = SecondsOf(kLayers);
  const double many = SecondsOf(kTimes * kLayers);
  CAPTURE(few);
  CAPTURE(many);
  CHECK(many < few * kTimes * 3);  // 64 times as long if it grew with the square
}

}  // namespace
}  // namespace shardwright
