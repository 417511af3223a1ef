#include "schedule/internal/arena.h"

#include <algorithm>
#include <cstddef>
#include <limits>

namespace shardwright {
namespace {

constexpr std::int32_t kNone = -1;  // never occupied so far
constexpr std::int32_t kSafe = -2;  // occupied first by a life that needs no check
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

std::size_t IndexOf(Stream stream) { return static_cast<std::size_t>(stream); }

// A stretch of bytes with one history. It ends where the next one begins.
struct Segment {
  std::int64_t begin = 0;
  std::int32_t last = kNone;   // item that holds or held it last
  std::int32_t first = kNone;  // item that holds it first in each run; kSafe
  std::int32_t release = 0;    // of `last`, for the most frequent birth stream
};

class Packer {
 public:
  Packer(std::vector<ArenaItem>& items, std::int64_t base) : items_(items), base_(base) {
    std::array<std::size_t, kStreamCount> births{};
    for (const ArenaItem& item : items) {
      ++births[IndexOf(item.stream)];
    }
    main_ = static_cast<std::size_t>(std::max_element(births.begin(), births.end()) -
                                     births.begin());
  }

  std::int64_t Run() {
    int top_level = 0;
    for (const ArenaItem& item : items_) {
      top_level = std::max(top_level, item.level);
    }
    for (int level = 0; level <= top_level; ++level) {
      RunLevel(level);
    }
    return highest_;
  }

 private:
  void RunLevel(int level) {
    segments_.assign(1, Segment{base_, kNone, kNone, 0});
    end_ = base_;
    CollectFixed(level);
    for (std::size_t i = 0; i < items_.size(); ++i) {
      ArenaItem& item = items_[i];
      if (item.level > level) {
        continue;
      }
      if (item.offset < 0) {
        item.offset = FindGap(i);
        highest_ = std::max(highest_, item.offset + item.size);
      }
      Occupy(static_cast<std::int32_t>(i));
    }
  }

  // Items placed by earlier levels, which the ones placed now must keep clear of.
  void CollectFixed(int level) {
    for (auto& fixed : fixed_) {
      fixed.clear();
    }
    unsafe_fixed_.clear();
    for (std::size_t i = 0; i < items_.size(); ++i) {
      if (items_[i].level < level && items_[i].birth >= 0) {
        fixed_[IndexOf(items_[i].stream)].push_back(static_cast<std::int32_t>(i));
        if (!items_[i].precedes_next_run) {
          unsafe_fixed_.push_back(static_cast<std::int32_t>(i));
        }
        highest_ = std::max(highest_, items_[i].offset + items_[i].size);
      }
    }
  }

  // Bytes of fixed items that are born later, but not after `item`.
  void CollectForbidden(std::size_t i) {
    const ArenaItem& item = items_[i];
    forbidden_.clear();
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      const std::vector<std::int32_t>& fixed = fixed_[s];
      auto f = std::upper_bound(fixed.begin(), fixed.end(), static_cast<std::int32_t>(i));
      for (; f != fixed.end(); ++f) {
        const ArenaItem& later = items_[static_cast<std::size_t>(*f)];
        if (later.birth >= item.release[s]) {
          break;
        }
        forbidden_.emplace_back(later.offset, later.offset + later.size);
      }
    }
    if (!item.follows_last_run) {
      for (const std::int32_t f : unsafe_fixed_) {
        const ArenaItem& later = items_[static_cast<std::size_t>(f)];
        if (f > static_cast<std::int32_t>(i) && !item.before_next_birth.Covers(later.last)) {
          forbidden_.emplace_back(later.offset, later.offset + later.size);
        }
      }
    }
    std::sort(forbidden_.begin(), forbidden_.end());
  }

  // May `item` take bytes that `first` will hold first in the next run?
  [[nodiscard]] bool MayPrecede(const ArenaItem& item, std::int32_t first) const {
    return first < 0 || item.precedes_next_run ||
           items_[static_cast<std::size_t>(first)].before_next_birth.Covers(item.last);
  }

  std::int64_t FindGap(std::size_t i) {
    const ArenaItem& item = items_[i];
    CollectForbidden(i);
    next_forbidden_ = 0;
    best_offset_ = -1;
    best_room_ = kUnbounded;
    const std::size_t s = IndexOf(item.stream);
    std::int64_t run_begin = -1;  // of the free stretch that is being read, or -1
    for (const Segment& segment : segments_) {
      const bool is_released =
          segment.last < 0 ||
          (s == main_ ? segment.release
                      : items_[static_cast<std::size_t>(segment.last)].release[s]) <= item.birth;
      if (is_released && MayPrecede(item, segment.first)) {
        run_begin = run_begin < 0 ? segment.begin : run_begin;
      } else if (run_begin >= 0) {
        OfferRun(run_begin, segment.begin, item.size);
        run_begin = -1;
      }
    }
    OfferRun(run_begin, kUnbounded, item.size);  // the last segment is always free
    return best_offset_;
  }

  // Offers the free bytes [begin, end) without the forbidden ones. Runs come in ascending order.
  void OfferRun(std::int64_t begin, std::int64_t end, std::int64_t size) {
    while (next_forbidden_ < forbidden_.size() && forbidden_[next_forbidden_].second <= begin) {
      ++next_forbidden_;
    }
    for (std::size_t f = next_forbidden_; f < forbidden_.size() && forbidden_[f].first < end; ++f) {
      if (forbidden_[f].first > begin) {
        Offer(begin, forbidden_[f].first, size);
      }
      begin = std::max(begin, forbidden_[f].second);
    }
    if (begin < end) {
      Offer(begin, end, size);
    }
  }

  void Offer(std::int64_t begin, std::int64_t end, std::int64_t size) {
    // Above all items there is room without end, but only what lies below the highest is free of
    // charge.
    const std::int64_t room = end == kUnbounded && begin + size <= highest_ ? highest_ - begin
                                                                            : end - begin;
    if (end - begin >= size && room < best_room_) {
      best_room_ = room;
      best_offset_ = begin;
    } else if (best_offset_ < 0 && end == kUnbounded) {
      best_offset_ = begin;
    }
  }

  // Splits the segment that contains `at`, so that one begins there. Returns its index.
  std::size_t SplitAt(std::int64_t at) {
    const auto after =
        std::upper_bound(segments_.begin(), segments_.end(), at,
                         [](std::int64_t value, const Segment& s) { return value < s.begin; });
    const auto index = static_cast<std::size_t>(after - segments_.begin());
    if (segments_[index - 1].begin == at) {
      return index - 1;
    }
    Segment copy = segments_[index - 1];
    copy.begin = at;
    segments_.insert(after, copy);
    return index;
  }

  // The item takes its bytes: what held them before is forgotten, except who was first.
  void Occupy(std::int32_t i) {
    const ArenaItem& item = items_[static_cast<std::size_t>(i)];
    const std::int64_t item_end = item.offset + item.size;
    if (item.size == 0) {
      return;
    }
    if (item_end > end_) {
      end_ = item_end;
      segments_.push_back({end_, kNone, kNone, 0});
    }
    const std::size_t from = SplitAt(item.offset);
    const std::size_t to = SplitAt(item_end);
    std::size_t write = from;
    for (std::size_t read = from; read < to; ++read) {
      Segment segment = segments_[read];
      if (segment.first == kNone) {
        segment.first = item.follows_last_run ? kSafe : i;
      }
      segment.last = i;
      segment.release = item.release[main_];
      if (write > from && segments_[write - 1].first == segment.first) {
        continue;
      }
      segments_[write++] = segment;
    }
    segments_.erase(segments_.begin() + static_cast<std::ptrdiff_t>(write),
                    segments_.begin() + static_cast<std::ptrdiff_t>(to));
  }

  std::vector<ArenaItem>& items_;
  std::int64_t base_;
  std::size_t main_ = 0;           // the stream with most births
  std::vector<Segment> segments_;  // ascending; the last one begins at end_ and was never occupied
  std::int64_t end_ = 0;
  std::int64_t highest_ = 0;
  std::array<std::vector<std::int32_t>, kStreamCount> fixed_;  // by birth stream, ascending
  std::vector<std::int32_t> unsafe_fixed_;
  std::vector<std::pair<std::int64_t, std::int64_t>> forbidden_;  // [begin, end), ascending
  std::size_t next_forbidden_ = 0;
  std::int64_t best_offset_ = -1;
  std::int64_t best_room_ = 0;
};

}  // namespace

std::int64_t PackArena(std::vector<ArenaItem>& items, std::int64_t base) {
  return std::max(base, Packer(items, base).Run());
}

}  // namespace shardwright
