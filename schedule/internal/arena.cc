#include "schedule/internal/arena.h"

#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "core/ranges.h"
#include "core/threads.h"

namespace shardwright {
namespace {

constexpr std::int32_t kNone = -1;  // never occupied so far
constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

using Range = std::pair<std::int64_t, std::int64_t>;  // [begin, end)

std::size_t IndexOf(Stream stream) {
  return static_cast<std::size_t>(stream);
}

// The bytes that what is born on one stream may take now, as runs that do not touch each other. The
// last one has no end. Every change and every search costs the logarithm of their number.
class FreeRuns {
 public:
  using Runs = std::map<std::int64_t, std::int64_t>;  // begin to end

  explicit FreeRuns(std::int64_t base = 0) : runs_{{base, kUnbounded}} {}

  // Adds bytes of which none is free.
  void Add(std::int64_t begin, std::int64_t end) {
    auto next = runs_.upper_bound(begin);
    if (next != runs_.end() && next->first == end) {
      end = next->second;
      next = Drop(next);
    }
    if (next != runs_.begin() && std::prev(next)->second == begin) {
      begin = std::prev(next)->first;
      next = Drop(std::prev(next));
    }
    Put(next, begin, end);
  }

  // Takes away bytes, free or not.
  void Remove(std::int64_t begin, std::int64_t end) {
    auto run = runs_.upper_bound(begin);
    if (run != runs_.begin() && std::prev(run)->second > begin) {
      --run;
    }
    while (run != runs_.end() && run->first < end) {
      const Range old = *run;
      run = Drop(run);
      if (old.first < begin) {
        Put(run, old.first, begin);
      }
      if (end < old.second) {
        Put(run, end, old.second);
        return;
      }
    }
  }

  // The first run that ends behind a byte.
  [[nodiscard]] Runs::const_iterator FirstBehind(std::int64_t byte) const {
    const auto next = runs_.upper_bound(byte);
    return next != runs_.begin() && std::prev(next)->second > byte ? std::prev(next) : next;
  }
  [[nodiscard]] Runs::const_iterator end() const { return runs_.end(); }
  [[nodiscard]] std::int64_t last_begin() const { return runs_.rbegin()->first; }

  // The others by length, then begin.
  [[nodiscard]] const std::set<Range>& by_length() const { return by_length_; }

 private:
  Runs::iterator Drop(Runs::iterator run) {
    if (run->second != kUnbounded) {
      by_length_.erase({run->second - run->first, run->first});
    }
    return runs_.erase(run);
  }
  void Put(Runs::iterator before, std::int64_t begin, std::int64_t end) {
    runs_.emplace_hint(before, begin, end);
    if (end != kUnbounded) {
      by_length_.emplace(end - begin, begin);
    }
  }

  Runs runs_;
  std::set<Range> by_length_;
};

class Packer {
 public:
  Packer(std::vector<ArenaItem>& items, std::int64_t base) : items_(items), base_(base) {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (AnyOf(items, [s](const ArenaItem& item) { return IndexOf(item.stream) == s; })) {
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
    holders_ = {{base_, kNone}};
    early_.clear();
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      free_[s] = FreeRuns(base_);
      releases_[s].clear();
    }
    CollectFixed(level);
    for (std::size_t i = 0; i < items_.size(); ++i) {
      ThrowIfStopped();
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
    if (!item.precedes_next_run) {
      for (const Early& early : early_) {
        if (!items_[early.first].before_next_birth.Covers(item.last)) {
          forbidden_.push_back(early.bytes);
        }
      }
    }
    SortAll(forbidden_);
    JoinForbidden();
  }

  void JoinForbidden() {
    std::size_t count = 0;
    for (const Range& range : forbidden_) {
      if (count > 0 && range.first <= forbidden_[count - 1].second) {
        forbidden_[count - 1].second = std::max(forbidden_[count - 1].second, range.second);
      } else {
        forbidden_[count++] = range;
      }
    }
    forbidden_.resize(count);
  }

  std::int64_t FindGap(std::size_t i) {
    const ArenaItem& item = items_[i];
    ReleaseUntil(item.birth, IndexOf(item.stream));
    CollectForbidden(i);
    const FreeRuns& runs = free_[IndexOf(item.stream)];
    next_forbidden_ = 0;
    best_offset_ = -1;
    best_room_ = kUnbounded;
    cut_.clear();  // begins of the runs that hold forbidden bytes, ascending
    std::int64_t done = -1;
    for (const Range& range : forbidden_) {
      auto run = runs.FirstBehind(std::max(range.first, done));
      for (; run != runs.end() && run->first < range.second; ++run) {
        OfferRun(run->first, run->second, item.size);
        cut_.push_back(run->first);
        done = run->second;
      }
    }
    const std::set<Range>& others = runs.by_length();
    for (auto run = others.lower_bound({item.size, 0}); run != others.end(); ++run) {
      if (!std::binary_search(cut_.begin(), cut_.end(), run->second)) {
        Offer(run->second, run->second + run->first, item.size);
        break;
      }
    }
    if (cut_.empty() || cut_.back() != runs.last_begin()) {
      Offer(runs.last_begin(), kUnbounded, item.size);
    }
    return best_offset_;
  }

  // What was released on stream `s` up to a birth is free for it, unless something else has taken
  // the bytes since.
  void ReleaseUntil(std::int32_t birth, std::size_t s) {
    std::vector<Release>& queue = releases_[s];
    while (!queue.empty() && queue.front().first <= birth) {
      std::pop_heap(queue.begin(), queue.end(), std::greater<>());
      const std::int32_t i = queue.back().second;
      queue.pop_back();
      const ArenaItem& item = items_[static_cast<std::size_t>(i)];
      auto piece = holders_.lower_bound(item.offset);
      while (piece->first < item.offset + item.size) {
        const auto next = std::next(piece);
        if (piece->second == i) {
          free_[s].Add(piece->first, next->first);
        }
        piece = next;
      }
    }
  }

  // Offers the free bytes [begin, end) without the forbidden ones. Called in ascending order.
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
    const bool is_better =
        best_offset_ < 0 || room < best_room_ || (room == best_room_ && begin < best_offset_);
    if (end - begin >= size && is_better) {
      best_room_ = room;
      best_offset_ = begin;
    }
  }

  // The item takes its bytes: what held them before is forgotten, except who was first.
  void Occupy(std::int32_t i) {
    const ArenaItem& item = items_[static_cast<std::size_t>(i)];
    if (item.size == 0) {
      return;
    }
    const auto from = SplitAt(item.offset);
    const auto to = SplitAt(item.offset + item.size);
    if (!item.follows_last_run) {
      for (auto piece = from; piece != to; ++piece) {
        if (piece->second == kNone) {
          early_.push_back({{piece->first, std::next(piece)->first}, static_cast<std::size_t>(i)});
        }
      }
    }
    from->second = i;
    holders_.erase(std::next(from), to);
    for (const std::size_t s : streams_) {
      free_[s].Remove(item.offset, item.offset + item.size);
      if (item.release[s] != ArenaItem::kNever) {
        releases_[s].emplace_back(item.release[s], i);
        std::push_heap(releases_[s].begin(), releases_[s].end(), std::greater<>());
      }
    }
  }

  // Splits the piece that contains `at`, so that one begins there.
  std::map<std::int64_t, std::int32_t>::iterator SplitAt(std::int64_t at) {
    const auto after = holders_.upper_bound(at);
    const auto old = std::prev(after);
    return old->first == at ? old : holders_.emplace_hint(after, at, old->second);
  }

  // Bytes that an item holds first in each run, and that the last run may still use.
  struct Early {
    Range bytes;
    std::size_t first;
  };
  using Release = std::pair<std::int32_t, std::int32_t>;  // position, item

  std::vector<ArenaItem>& items_;
  std::int64_t base_;
  std::vector<std::size_t> streams_;              // on which something is born
  std::map<std::int64_t, std::int32_t> holders_;  // pieces by begin: the last item on them
  std::vector<Early> early_;
  std::array<FreeRuns, kStreamCount> free_;
  std::array<std::vector<Release>, kStreamCount> releases_;  // heaps, the next one first
  std::int64_t highest_ = 0;
  std::array<std::vector<std::int32_t>, kStreamCount> fixed_;  // by birth stream, ascending
  std::vector<std::int32_t> unsafe_fixed_;
  std::vector<Range> forbidden_;  // ascending
  std::vector<std::int64_t> cut_;
  std::size_t next_forbidden_ = 0;
  std::int64_t best_offset_ = -1;
  std::int64_t best_room_ = 0;
};

}  // namespace

std::int64_t PackArena(std::vector<ArenaItem>& items, std::int64_t base) {
  return std::max(base, Packer(items, base).Run());
}

}  // namespace shardwright
