#include "schedule/internal/arena.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace shardwright {
namespace {

constexpr std::int32_t kNone = -1;  // never occupied so far
constexpr std::int32_t kSafe = -2;  // occupied first by a life that needs no check
constexpr std::size_t kBlock = 8;   // segments that are skipped together
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

std::size_t IndexOf(Stream stream) {
  return static_cast<std::size_t>(stream);
}

// Consecutive stretches of bytes, each with one history; each ends where the next one begins. The
// last one was never occupied and has no end. Kept as one array per field, since the search for a
// gap reads little but the release positions of one stream.
class Segments {
 public:
  // `streams`: those on which something is born.
  Segments(std::int64_t base, std::vector<std::size_t> streams) : streams_(std::move(streams)) {
    begin.assign(1, base);
    first.assign(1, kNone);
    for (const std::size_t s : streams_) {
      release[s].assign(1, 0);
    }
  }

  std::vector<std::int64_t> begin;
  std::vector<std::int32_t> first;  // item that holds it first in each run; kNone, kSafe
  std::array<std::vector<std::int32_t>, kStreamCount> release;  // of the last holder, by stream

  [[nodiscard]] std::size_t size() const { return begin.size(); }

  // Splits the segment that contains `at`, so that one begins there. Returns its index.
  std::size_t SplitAt(std::int64_t at) {
    const auto after = std::upper_bound(begin.begin(), begin.end(), at);
    const std::ptrdiff_t next = after - begin.begin();
    if (*(after - 1) == at) {
      return static_cast<std::size_t>(next - 1);
    }
    const auto old = static_cast<std::size_t>(next - 1);
    begin.insert(after, at);
    first.insert(first.begin() + next, first[old]);
    for (const std::size_t s : streams_) {
      release[s].insert(release[s].begin() + next, release[s][old]);
    }
    return old + 1;
  }

  // Overwrites segment `to` with `from`'s bytes and a new holder.
  void Write(std::size_t to, std::size_t from, std::int32_t first_holder, const ArenaItem& holder) {
    begin[to] = begin[from];
    first[to] = first_holder;
    for (const std::size_t s : streams_) {
      release[s][to] = holder.release[s];
    }
  }

  void Erase(std::size_t from, std::size_t to) {
    const auto erase = [&](auto& values) {
      values.erase(values.begin() + static_cast<std::ptrdiff_t>(from),
                   values.begin() + static_cast<std::ptrdiff_t>(to));
    };
    if (from < to) {
      erase(begin);
      erase(first);
      for (const std::size_t s : streams_) {
        erase(release[s]);
      }
    }
  }

 private:
  std::vector<std::size_t> streams_;
};

class Packer {
 public:
  Packer(std::vector<ArenaItem>& items, std::int64_t base) : items_(items), base_(base) {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (std::any_of(items.begin(), items.end(),
                      [s](const ArenaItem& item) { return IndexOf(item.stream) == s; })) {
        streams_.push_back(s);
      }
    }
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
    segments_ = Segments(base_, streams_);
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
    const std::vector<std::int32_t>& release = segments_.release[IndexOf(item.stream)];
    std::int64_t run_begin = -1;  // of the free stretch that is being read, or -1
    std::size_t g = 0;
    while (g < release.size()) {
      if (IsBlockHeld(release, g, item.birth)) {
        EndRun(run_begin, segments_.begin[g], item.size);
        g += kBlock;
        continue;
      }
      const std::size_t block_end = std::min(g + kBlock, release.size());
      for (; g < block_end; ++g) {
        if (release[g] <= item.birth && MayPrecede(item, segments_.first[g])) {
          run_begin = run_begin < 0 ? segments_.begin[g] : run_begin;
        } else {
          EndRun(run_begin, segments_.begin[g], item.size);
        }
      }
    }
    OfferRun(run_begin, kUnbounded, item.size);  // the last segment is always free
    return best_offset_;
  }

  // Are all of the kBlock segments from g on in use at `birth`? A quick way past the long lives. A
  // difference has its sign bit set where a segment is released.
  static bool IsBlockHeld(const std::vector<std::int32_t>& release, std::size_t g,
                          std::int32_t birth) {
    if (g + kBlock > release.size()) {
      return false;
    }
    std::int32_t any_released = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      any_released |= release[g + i] - birth - 1;
    }
    return any_released >= 0;
  }

  void EndRun(std::int64_t& run_begin, std::int64_t end, std::int64_t size) {
    if (run_begin >= 0) {
      OfferRun(run_begin, end, size);
      run_begin = -1;
    }
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
    const std::int64_t room =
        end == kUnbounded && begin + size <= highest_ ? highest_ - begin : end - begin;
    if (end - begin >= size && room < best_room_) {
      best_room_ = room;
      best_offset_ = begin;
    } else if (best_offset_ < 0 && end == kUnbounded) {
      best_offset_ = begin;
    }
  }

  // The item takes its bytes: what held them before is forgotten, except who was first.
  void Occupy(std::int32_t i) {
    const ArenaItem& item = items_[static_cast<std::size_t>(i)];
    if (item.size == 0) {
      return;
    }
    const std::size_t from = segments_.SplitAt(item.offset);
    const std::size_t to = segments_.SplitAt(item.offset + item.size);
    std::size_t write = from;
    for (std::size_t read = from; read < to; ++read) {
      std::int32_t first = segments_.first[read];
      if (first == kNone) {
        first = item.follows_last_run ? kSafe : i;
      }
      if (write > from && segments_.first[write - 1] == first) {
        continue;
      }
      segments_.Write(write++, read, first, item);
    }
    segments_.Erase(write, to);
  }

  std::vector<ArenaItem>& items_;
  std::int64_t base_;
  std::vector<std::size_t> streams_;  // on which something is born
  Segments segments_{0, {}};
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
