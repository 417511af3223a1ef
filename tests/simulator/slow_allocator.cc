#include "tests/simulator/slow_allocator.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/units.h"
#include "simulator/caching_allocator.h"

namespace shardwright {
namespace {

constexpr std::int64_t kMi = 1 << 20;

}  // namespace

// Runs of equal kind (in use pieces end a run; mapped and unmapped bytes are different kinds).
std::vector<SlowAllocator::Gap> SlowAllocator::Gaps(const Segment& segment) const {
  std::vector<Gap> gaps;
  const std::int64_t end = segment.page * static_cast<std::int64_t>(segment.is_mapped.size());
  std::int64_t at = 0;
  bool extends = false;  // the last gap ends at `at`
  while (at < end) {
    const auto piece = segment.pieces.find(at);
    if (piece != segment.pieces.end()) {
      at += piece->second.size;
      extends = false;
      continue;
    }
    const std::int64_t page = at / segment.page;
    std::int64_t stop = (page + 1) * segment.page;
    const auto next_piece = segment.pieces.upper_bound(at);
    if (next_piece != segment.pieces.end()) {
      stop = std::min(stop, next_piece->first);
    }
    const bool is_mapped = segment.is_mapped[static_cast<std::size_t>(page)];
    if (extends && gaps.back().is_mapped == is_mapped) {
      gaps.back().size += stop - at;
    } else {
      gaps.push_back({segment.serial, at, stop - at, is_mapped});
    }
    extends = true;
    at = stop;
  }
  for (std::size_t i = 0; i < gaps.size(); ++i) {
    gaps[i].is_whole = gaps[i].offset == 0 && gaps[i].size == end;
    const bool is_followed = i + 1 < gaps.size() && !gaps[i + 1].is_mapped &&
                             gaps[i + 1].offset == gaps[i].offset + gaps[i].size;
    gaps[i].touches_unmapped = is_followed;
    gaps[i].unmapped_behind = is_followed ? gaps[i + 1].size : 0;
  }
  return gaps;
}

std::vector<SlowAllocator::Gap> SlowAllocator::Cached(int stream, bool is_small) const {
  std::vector<Gap> cached;
  for (const Segment& segment : segments_) {
    if (segment.stream == stream && segment.is_small == is_small) {
      for (const Gap& gap : Gaps(segment)) {
        if (gap.is_mapped) {
          cached.push_back(gap);
        }
      }
    }
  }
  std::sort(cached.begin(), cached.end(), [](const Gap& a, const Gap& b) {
    return std::tuple(a.size, a.serial, a.offset) < std::tuple(b.size, b.serial, b.offset);
  });
  return cached;
}

SlowAllocator::Segment& SlowAllocator::Find(std::int64_t serial) {
  return *std::find_if(segments_.begin(), segments_.end(),
                       [&](const Segment& s) { return s.serial == serial; });
}

void SlowAllocator::DropSegment(std::int64_t serial) {
  std::erase_if(segments_, [&](const Segment& s) { return s.serial == serial; });
}

const SlowAllocator::Gap* SlowAllocator::BestFit(const std::vector<Gap>& cached,
                                                 std::int64_t size) const {
  std::size_t i = 0;
  while (i < cached.size() && cached[i].size < size) {
    ++i;
  }
  if (i == cached.size()) {
    return nullptr;
  }
  if (options_.expandable_segments) {
    while (i + 1 < cached.size() && cached[i + 1].size + cached[i + 1].unmapped_behind <
                                        cached[i].size + cached[i].unmapped_behind) {
      ++i;
    }
  }
  const std::int64_t limit = options_.max_split_size.value;
  if (size < limit && cached[i].size >= limit) {
    return nullptr;
  }
  if (size >= limit && cached[i].size >= size + 20 * kMi) {
    return nullptr;
  }
  return &cached[i];
}

// Puts a piece at the front of a gap that is large enough.
SlowAllocator::Result SlowAllocator::Place(Result result, const Gap& gap, std::int64_t size) {
  Segment& segment = Find(gap.serial);
  const std::int64_t rest = gap.size - size;
  const bool splits = segment.is_small || options_.expandable_segments
                          ? rest >= 512
                          : size < options_.max_split_size.value && rest > kMi;
  result.piece = next_piece_++;
  segment.pieces[gap.offset] = {result.piece, splits ? size : gap.size, false};
  NoteAges();
  return result;
}

SlowAllocator::Result SlowAllocator::Alloc(std::int64_t size, int stream, std::int64_t now) {
  Result result;
  result.sync_until = now;
  if (size == 0) {
    return result;
  }
  Poll(now, false, result);
  while (size % 512 != 0) {
    ++size;
  }
  const bool is_small = size <= kMi;
  large_searches_ += is_small ? 0 : 1;
  const std::vector<Gap> cached = Cached(stream, is_small);
  if (const Gap* fit = BestFit(cached, size)) {
    return Place(result, *fit, size);
  }
  Gap gap;
  if (options_.gc_threshold > 0 && !options_.expandable_segments) {
    Collect(result);
  }
  if (NewMemory(size, stream, is_small, result, gap)) {
    return Place(result, gap, size);
  }
  if (ReleaseOversize(size, stream, is_small, result) &&
      NewMemory(size, stream, is_small, result, gap)) {
    return Place(result, gap, size);
  }
  result.retried = true;
  Poll(now, true, result);
  const std::int64_t before = Reserved();
  ReleaseAll(result);
  result.freed_by_retry = before - Reserved();
  if (NewMemory(size, stream, is_small, result, gap)) {
    return Place(result, gap, size);
  }
  NoteAges();
  result.out_of_memory = true;
  return result;
}

void SlowAllocator::Free(std::int64_t piece, std::span<const PendingUse> uses) {
  for (Segment& segment : segments_) {
    for (auto& [offset, p] : segment.pieces) {
      if (p.id != piece) {
        continue;
      }
      p.is_waiting = true;
      for (const PendingUse& use : uses) {
        if (use.stream != segment.stream) {
          events_.push_back({use.stream, use.done.value, piece});
        }
      }
      FinishPiece(piece);
      return;
    }
  }
}

// Removes a freed piece if no event is left for it.
void SlowAllocator::FinishPiece(std::int64_t piece) {
  for (const Event& event : events_) {
    if (event.piece == piece) {
      return;
    }
  }
  for (Segment& segment : segments_) {
    std::erase_if(segment.pieces, [&](const auto& p) { return p.second.id == piece; });
  }
  NoteAges();
}

void SlowAllocator::Poll(std::int64_t now, bool wait, Result& result) {
  std::set<int> stopped;
  std::vector<Event> left;
  std::vector<std::int64_t> touched;
  for (const Event& event : events_) {
    if (wait) {
      result.sync_until = std::max(result.sync_until, event.done);
    }
    if (!wait && (stopped.contains(event.stream) || event.done > now)) {
      stopped.insert(event.stream);
      left.push_back(event);
    } else {
      touched.push_back(event.piece);
    }
  }
  events_ = left;
  for (const std::int64_t piece : touched) {
    FinishPiece(piece);
  }
}

bool SlowAllocator::NewMemory(std::int64_t size, int stream, bool is_small, Result& result,
                              Gap& gap) {
  if (options_.expandable_segments) {
    return GrowRange(size, stream, is_small, result, gap);
  }
  std::int64_t bytes = 2 * kMi;
  if (!is_small && size < 10 * kMi) {
    bytes = 20 * kMi;
  } else if (!is_small) {
    bytes = size;
    while (bytes % (2 * kMi) != 0) {
      bytes += 512;
    }
  }
  if (Reserved() + bytes > options_.capacity.value) {
    return false;
  }
  segments_.push_back({next_serial_++, stream, is_small, bytes, {true}, {}});
  ++result.mallocs;
  peak_reserved_ = std::max(peak_reserved_, Reserved());
  gap = Gaps(segments_.back()).front();
  return true;
}

// The lowest run of free bytes, mapped or not, that is long enough, contains unmapped bytes and
// begins with them or with one mapped gap before them.
bool SlowAllocator::FindRoom(std::int64_t size, int stream, bool is_small, std::int64_t& serial,
                             std::int64_t& begin) const {
  for (const Segment& segment : segments_) {
    if (segment.stream != stream || segment.is_small != is_small) {
      continue;
    }
    const std::vector<Gap> gaps = Gaps(segment);
    for (std::size_t i = 0; i < gaps.size(); ++i) {
      std::int64_t room = 0;
      for (std::size_t j = i; j < gaps.size() && gaps[j].offset == gaps[i].offset + room; ++j) {
        room += gaps[j].size;
      }
      if (room >= size && (!gaps[i].is_mapped || gaps[i].touches_unmapped)) {
        serial = segment.serial;
        begin = gaps[i].offset;
        return true;
      }
    }
  }
  return false;
}

// Maps the missing pages for a request, in a new range if no old one has room.
bool SlowAllocator::GrowRange(std::int64_t size, int stream, bool is_small, Result& result,
                              Gap& gap) {
  std::int64_t serial = next_serial_;
  std::int64_t begin = 0;
  if (!FindRoom(size, stream, is_small, serial, begin)) {
    const std::int64_t page_size = is_small ? 2 * kMi : 20 * kMi;
    const std::int64_t capacity = options_.capacity.value;
    const std::int64_t pages = (capacity + capacity / 8 + page_size - 1) / page_size;
    segments_.push_back({next_serial_++,
                         stream,
                         is_small,
                         page_size,
                         std::vector<bool>(static_cast<std::size_t>(pages), false),
                         {}});
  }
  Segment* segment = &Find(serial);
  // Each run of missing pages is one mapping, which succeeds or fails as a whole.
  const std::int64_t page = segment->page;
  const std::int64_t range_end = page * static_cast<std::int64_t>(segment->is_mapped.size());
  const std::int64_t end = std::min(begin + size, range_end);
  std::int64_t at = begin / page;
  while (at * page < end) {
    std::int64_t stop = at;
    while (stop * page < end && !segment->is_mapped[static_cast<std::size_t>(stop)]) {
      ++stop;
    }
    if (stop == at) {
      ++at;
      continue;
    }
    if (Reserved() + (stop - at) * page > options_.capacity.value) {
      return false;
    }
    ++result.mallocs;
    for (; at < stop; ++at) {
      segment->is_mapped[static_cast<std::size_t>(at)] = true;
    }
    peak_reserved_ = std::max(peak_reserved_, Reserved());
  }
  for (const Gap& g : Gaps(*segment)) {
    if (g.offset <= begin && begin < g.offset + g.size) {
      gap = g;
    }
  }
  return true;
}

void SlowAllocator::Collect(Result& result) {
  const auto limit = static_cast<std::int64_t>(options_.gc_threshold *
                                               static_cast<double>(options_.capacity.value));
  const std::int64_t excess = Reserved() - limit;
  std::int64_t reclaimed = 0;
  while (excess > 0 && reclaimed < excess) {
    std::vector<Gap> whole;
    double sum = 0;
    for (const Segment& segment : segments_) {
      for (const Gap& gap : Gaps(segment)) {
        if (gap.is_whole && !segment.is_small) {
          whole.push_back(gap);
          sum += static_cast<double>(AgeOf(gap));
        }
      }
    }
    if (whole.empty()) {
      return;
    }
    for (const Gap& gap : whole) {
      if (static_cast<double>(AgeOf(gap)) >= sum / static_cast<double>(whole.size())) {
        reclaimed += gap.size;
        ++result.frees;
        DropSegment(gap.serial);
      }
    }
  }
}

bool SlowAllocator::ReleaseOversize(std::int64_t size, int stream, bool is_small, Result& result) {
  const std::int64_t limit = options_.max_split_size.value;
  if (limit == std::numeric_limits<std::int64_t>::max() || options_.expandable_segments) {
    return false;
  }
  const std::vector<Gap> cached = Cached(stream, is_small);
  const std::int64_t target = std::max(size, limit);
  for (const Gap& gap : cached) {
    if (gap.size >= target) {
      ++result.frees;
      DropSegment(gap.serial);
      return true;
    }
  }
  std::int64_t released = 0;
  for (std::size_t i = cached.size(); i-- > 0 && released < target && cached[i].size >= limit;) {
    released += cached[i].size;
    ++result.frees;
    DropSegment(cached[i].serial);
  }
  return released >= target;
}

void SlowAllocator::ReleaseAll(Result& result) {
  const std::vector<Segment> before = segments_;
  for (const Segment& old : before) {
    for (const Gap& gap : Gaps(old)) {
      if (!gap.is_mapped) {
        continue;
      }
      // Every page that lies in the gap as a whole; a normal segment is one page.
      const std::int64_t first = (gap.offset + old.page - 1) / old.page;
      const std::int64_t last = (gap.offset + gap.size) / old.page;
      for (std::int64_t page = first; page < last; ++page) {
        Find(old.serial).is_mapped[static_cast<std::size_t>(page)] = false;
      }
      if (first < last) {
        ++result.frees;
        const std::vector<bool>& mapped = Find(old.serial).is_mapped;
        if (std::find(mapped.begin(), mapped.end(), true) == mapped.end()) {
          DropSegment(old.serial);
        }
      }
    }
  }
}

void SlowAllocator::NoteAges() {
  if (options_.gc_threshold == 0) {
    return;  // nobody asks
  }
  decltype(born_) born;
  for (const Segment& segment : segments_) {
    for (const Gap& gap : Gaps(segment)) {
      const std::tuple key(gap.serial, gap.offset, gap.size);
      const auto known = born_.find(key);
      born[key] = known == born_.end() ? large_searches_ : known->second;
    }
  }
  born_ = born;
}

std::int64_t SlowAllocator::AgeOf(const Gap& gap) const {
  return large_searches_ - born_.at({gap.serial, gap.offset, gap.size});
}

std::int64_t SlowAllocator::Allocated() const {
  std::int64_t sum = 0;
  for (const Segment& segment : segments_) {
    for (const auto& [offset, piece] : segment.pieces) {
      sum += piece.is_waiting ? 0 : piece.size;
    }
  }
  return sum;
}

std::int64_t SlowAllocator::Active() const {
  std::int64_t sum = 0;
  for (const Segment& segment : segments_) {
    for (const auto& [offset, piece] : segment.pieces) {
      sum += piece.size;
    }
  }
  return sum;
}

std::int64_t SlowAllocator::Reserved() const {
  std::int64_t sum = 0;
  for (const Segment& segment : segments_) {
    sum += segment.page * std::count(segment.is_mapped.begin(), segment.is_mapped.end(), true);
  }
  return sum;
}

std::vector<std::string> SlowAllocator::Listing() const {
  std::vector<std::string> lines;
  for (const Segment& segment : segments_) {
    std::map<std::int64_t, std::string> blocks;
    for (const auto& [offset, piece] : segment.pieces) {
      blocks[offset] = (piece.is_waiting ? "waiting" : std::to_string(piece.id)) + "@" +
                       std::to_string(offset) + "=" + std::to_string(piece.size);
    }
    for (const Gap& gap : Gaps(segment)) {
      blocks[gap.offset] = std::string(gap.is_mapped ? "free" : "unmapped") + "@" +
                           std::to_string(gap.offset) + "=" + std::to_string(gap.size);
    }
    std::string line =
        std::string(segment.is_small ? "small" : "large") + " s" + std::to_string(segment.stream);
    for (const auto& [offset, text] : blocks) {
      line += " " + text;
    }
    lines.push_back(line);
  }
  return lines;
}

std::string SlowAllocator::Canonical(std::int64_t now, std::span<const std::int64_t> live) const {
  std::map<std::int64_t, std::string> place_of;  // piece -> "pool/segment in pool/offset"
  std::map<std::string, std::string> pools;
  std::map<std::string, int> segment_count;
  for (const Segment& segment : segments_) {
    const std::string pool =
        std::string(segment.is_small ? "small" : "large") + std::to_string(segment.stream);
    const std::string name = pool + "/" + std::to_string(segment_count[pool]++);
    std::string& text = pools[pool];
    text += "|";
    for (const auto& [offset, piece] : segment.pieces) {
      text += std::to_string(offset) + (piece.is_waiting ? "w" : "a") + std::to_string(piece.size) +
              " ";
      place_of[piece.id] = name + "/" + std::to_string(offset);
    }
    for (const Gap& gap : Gaps(segment)) {
      text +=
          std::to_string(gap.offset) + (gap.is_mapped ? "f" : "u") + std::to_string(gap.size) + " ";
      if (options_.gc_threshold > 0 && gap.is_mapped && gap.is_whole && !segment.is_small) {
        text += "age" + std::to_string(AgeOf(gap)) + " ";
      }
    }
  }
  std::map<int, std::string> queues;
  for (const Event& event : events_) {
    queues[event.stream] += place_of[event.piece] + ":" +
                            std::to_string(std::max<std::int64_t>(0, event.done - now)) + " ";
  }
  std::string all;
  for (const auto& [pool, text] : pools) {
    all += pool + text + "\n";
  }
  for (const auto& [stream, text] : queues) {
    all += "events " + std::to_string(stream) + " " + text + "\n";
  }
  for (const std::int64_t piece : live) {
    all += "live " + (piece == 0 ? std::string("none") : place_of[piece]) + "\n";
  }
  return all;
}

}  // namespace shardwright
