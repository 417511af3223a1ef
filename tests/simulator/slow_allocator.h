#pragma once

// A second, slow implementation of the caching allocator's rules, written to be compared with
// simulator/caching_allocator.h. It shares no code and no idea with it: it keeps only which byte
// ranges are in use and which pages are mapped, and derives every free block anew by a linear scan.

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "core/units.h"
#include "simulator/caching_allocator.h"

namespace shardwright {

class SlowAllocator {
 public:
  explicit SlowAllocator(const AllocatorOptions& options) : options_(options) {}

  struct Result {
    std::int64_t piece = 0;  // 0: none
    bool out_of_memory = false;
    bool retried = false;
    int mallocs = 0;
    int frees = 0;
    std::int64_t freed_by_retry = 0;
    std::int64_t sync_until = 0;
  };
  Result Alloc(std::int64_t size, int stream, std::int64_t now);
  void Free(std::int64_t piece, std::span<const PendingUse> uses);

  [[nodiscard]] std::int64_t Allocated() const;
  [[nodiscard]] std::int64_t Active() const;
  [[nodiscard]] std::int64_t Reserved() const;
  [[nodiscard]] std::int64_t PeakReserved() const { return peak_reserved_; }
  // One line per segment: "small|large sN:" and " state@offset=size" per block; allocated blocks
  // show the piece's number as their state.
  [[nodiscard]] std::vector<std::string> Listing() const;
  // Everything future results depend on, as text: pool by pool; pieces are shown by their index in
  // `live`, events by the time left.
  [[nodiscard]] std::string Canonical(std::int64_t now, std::span<const std::int64_t> live) const;

 private:
  struct Piece {  // bytes in use or waiting
    std::int64_t id = 0;
    std::int64_t size = 0;
    bool is_waiting = false;
  };
  struct Segment {
    std::int64_t serial = 0;
    int stream = 0;
    bool is_small = false;
    std::int64_t page = 0;                 // pages are mapped or not as a whole
    std::vector<bool> is_mapped;           // per page
    std::map<std::int64_t, Piece> pieces;  // by offset
  };
  struct Gap {
    std::int64_t serial = 0;
    std::int64_t offset = 0;
    std::int64_t size = 0;
    bool is_mapped = false;
    bool is_whole = false;          // the segment's only block
    bool touches_unmapped = false;  // unmapped space follows
    std::int64_t unmapped_behind = 0;
  };
  struct Event {
    int stream = 0;
    std::int64_t done = 0;
    std::int64_t piece = 0;
  };

  [[nodiscard]] std::vector<Gap> Gaps(const Segment& segment) const;
  // All mapped gaps of a pool and stream by (size, address).
  [[nodiscard]] std::vector<Gap> Cached(int stream, bool is_small) const;
  [[nodiscard]] Segment& Find(std::int64_t serial);
  [[nodiscard]] const Gap* BestFit(const std::vector<Gap>& cached, std::int64_t size) const;
  Result Place(Result result, const Gap& gap, std::int64_t size);
  bool NewMemory(std::int64_t size, int stream, bool is_small, Result& result, Gap& gap);
  [[nodiscard]] bool FindRoom(std::int64_t size, int stream, bool is_small, std::int64_t& serial,
                              std::int64_t& begin) const;
  bool GrowRange(std::int64_t size, int stream, bool is_small, Result& result, Gap& gap);
  void DropSegment(std::int64_t serial);
  void Poll(std::int64_t now, bool wait, Result& result);
  void FinishPiece(std::int64_t piece);
  void Collect(Result& result);
  bool ReleaseOversize(std::int64_t size, int stream, bool is_small, Result& result);
  void ReleaseAll(Result& result);
  void NoteAges();
  [[nodiscard]] std::int64_t AgeOf(const Gap& gap) const;

  AllocatorOptions options_;
  std::vector<Segment> segments_;  // by serial
  std::vector<Event> events_;      // in order of the frees
  std::int64_t next_serial_ = 1;
  std::int64_t next_piece_ = 1;
  std::int64_t large_searches_ = 0;
  std::int64_t peak_reserved_ = 0;
  // Searches of the large pool when a gap (serial, offset, size) first appeared.
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::int64_t> born_;
};

}  // namespace shardwright
