// Replays a program's alloc and free points on the allocator model, with the host times of the
// spans.
//
// Example: a free whose block was recorded on the gather stream waits for the work queued there. If
// the host comes to the next alloc before that work has ended, the block is not reused and a new
// segment is reserved. So a host that runs further ahead reserves more memory.
//
// The last step is replayed up to 4 times: until it reserves no more than the step before, or
// leaves the allocator in the same state (by hash).

#include "simulator/reserved.h"

#include <array>

#include "core/ranges.h"
#include "core/threads.h"

namespace shardwright {
namespace {

class Replay {
 public:
  Replay(const Program& program, const AllocatorOptions& options, const DriverCosts& costs,
         bool until_full)
      : program_(program), costs_(costs), until_full_(until_full), allocator_(options) {
    std::uint32_t count = 0;
    for (const Buffer& buffer : program.buffers) {
      if (buffer.flat >= flats_.size()) {
        flats_.resize(buffer.flat + 1);
      }
      flats_[buffer.flat].size += buffer.size;
      first_block_.push_back(count);
      count += std::max(buffer.pieces.count, 1u);
    }
    first_block_.push_back(count);
    blocks_.resize(count);
    exists_.assign(program.buffers.size(), false);
  }

  // One run of a body, `shift` later than its spans. Returns what the allocator made the host wait.
  std::vector<HostStall> RunBody(std::span<const Span> spans, std::int64_t shift,
                                 const std::vector<HostStall>& included) {
    std::vector<HostStall> stalls;
    std::size_t next = 0;
    for (std::size_t i = 0; i < spans.size() && !IsOver(); ++i) {
      ThrowIfStopped();
      const Span& span = spans[i];
      std::int64_t now = span.issue_begin.value + shift;
      if (next < included.size() && included[next].before_op == span.op) {
        // Before the wait and the calls the host was done with the op before.
        now = included[next].drains && i > 0 ? spans[i - 1].issue_end.value + shift
                                             : now - included[next].time.value;
        ++next;
      }
      const Body& body = BodyOf(program_, span.body);
      waited_ = 0;
      const std::int64_t cost = Apply(body.PointsBefore(span.op), now);
      if (cost > 0) {
        stalls.push_back({span.op, SimTime(cost - waited_), waited_ > 0});
      }
      Note(body.PointsBefore(span.op));
      std::int64_t& queued = queued_until_[static_cast<std::size_t>(span.stream)];
      queued = std::max(queued, span.end.value + shift);
      if (span.op.value + 1 == body.size()) {
        (void)Apply(body.PointsAtEnd(), span.issue_end.value + shift);
        Note(body.PointsAtEnd());
      }
    }
    return stalls;
  }
  [[nodiscard]] const AllocatorCounters& counters() const { return allocator_.counters(); }
  [[nodiscard]] std::int64_t retries() const { return retries_; }
  void ResetPeaks() { allocator_.ResetPeaks(); }
  [[nodiscard]] std::size_t noted() const { return timeline_.size(); }
  void ForgetFrom(std::size_t count) { timeline_.resize(count); }
  [[nodiscard]] const std::vector<Bytes>& timeline() const { return timeline_; }
  // A hash of what later steps depend on, `shift` after the first one of them: what is cached, what
  // the program holds of it, and how far the host is behind.
  [[nodiscard]] std::uint64_t StateHash(std::int64_t shift) {
    live_ = blocks_;
    for (const FlatTensor& flat : flats_) {
      live_.push_back(flat.block);
    }
    const std::uint64_t state = allocator_.Fingerprint(SimTime(clock_), live_);
    constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15u;
    return state + static_cast<std::uint64_t>(clock_ - shift) * kOdd;
  }
  // Nothing is replayed any more.
  [[nodiscard]] bool IsOver() const { return until_full_ && out_of_memory_; }
  void Describe(ReservedMemory& result) const { result.out_of_memory = out_of_memory_; }

 private:
  struct FlatTensor {
    Bytes size{0};
    std::uint32_t slices = 0;  // that exist
    BlockHandle block;
  };

  std::int64_t Apply(std::span<const MemoryPoint> points, std::int64_t now) {
    const std::int64_t begin = std::max(now, clock_);
    clock_ = begin;
    for (const MemoryPoint& point : points) {
      const Buffer& buffer = program_.buffers[point.buffer.value];
      if (buffer.on_host) {
        continue;
      }
      const bool frees = point.kind == PointKind::kFree;
      if (frees) {
        Free(point);
      } else if (point.kind == PointKind::kAlloc || !exists_[point.buffer.value]) {
        AllocPieces(point.buffer);
      }
      exists_[point.buffer.value] = !frees;
    }
    return clock_ - begin;
  }

  void Note(std::span<const MemoryPoint> points) {
    if (!points.empty()) {
      timeline_.push_back(allocator_.counters().reserved);
    }
  }

  void AllocPieces(BufferId id) {
    const Buffer& buffer = program_.buffers[id.value];
    std::uint32_t block = first_block_[id.value];
    if (buffer.flat != 0) {
      FlatTensor& flat = flats_[buffer.flat];
      if (flat.slices++ == 0) {
        flat.block = Alloc(flat.size, buffer.owner);
      }
      return;
    }
    if (buffer.pieces.count == 0) {
      blocks_[block] = Alloc(buffer.size, buffer.owner);
      return;
    }
    Bytes sum{0};
    for (const Bytes piece : program_.PiecesOf(buffer)) {
      blocks_[block++] = Alloc(piece, buffer.owner);
      sum += piece;
    }
    if (sum > buffer.size) {
      FreePieces(id, {});  // they are gone when what they take turns with comes
    }
  }

  void Free(const MemoryPoint& point) {
    std::array<PendingUse, kStreamCount> uses;
    std::size_t count = 0;
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if ((point.recorded_streams >> s & 1u) != 0) {
        uses[count++] = {static_cast<int>(s), SimTime(queued_until_[s])};
      }
    }
    FreePieces(point.buffer, {uses.data(), count});
  }

  void FreePieces(BufferId id, std::span<const PendingUse> uses) {
    if (const std::uint32_t number = program_.buffers[id.value].flat; number != 0) {
      FlatTensor& flat = flats_[number];
      if (--flat.slices == 0) {
        allocator_.Free(flat.block, uses);
        flat.block = BlockHandle();
      }
      return;
    }
    for (std::uint32_t b = first_block_[id.value]; b < first_block_[id.value + 1]; ++b) {
      allocator_.Free(blocks_[b], uses);
      blocks_[b] = BlockHandle();
    }
  }

  BlockHandle Alloc(Bytes size, Stream owner) {
    const AllocResult result = allocator_.Alloc(size, static_cast<int>(owner), SimTime(clock_));
    if (result.retried) {
      ++retries_;
    }
    if (result.segments_freed > 0) {
      // cudaFree waits for everything queued on the device.
      const std::int64_t done = std::max(
          result.sync_until.value, *std::max_element(queued_until_.begin(), queued_until_.end()));
      waited_ += std::max<std::int64_t>(done - clock_, 0);
      clock_ = std::max(clock_, done);
    }
    clock_ +=
        result.cuda_malloc_count * costs_.malloc.value + result.segments_freed * costs_.free.value;
    out_of_memory_ |= result.out_of_memory;
    return result.block;
  }

  const Program& program_;
  DriverCosts costs_;
  bool until_full_;
  CachingAllocator allocator_;
  std::vector<std::uint32_t> first_block_;  // by buffer; one more at the end
  std::vector<BlockHandle> blocks_;         // one per piece
  std::vector<FlatTensor> flats_;           // by number; 0: none
  std::vector<bool> exists_;                // by buffer
  std::vector<BlockHandle> live_;           // scratch of StateHash
  std::vector<Bytes> timeline_;
  std::array<std::int64_t, kStreamCount> queued_until_{};  // end of the last op of each stream
  std::int64_t clock_ = 0;
  std::int64_t waited_ = 0;  // for the device, before one op
  std::int64_t retries_ = 0;
  bool out_of_memory_ = false;
};

}  // namespace

ReservedMemory ReplayAllocator(const Program& program, std::span<const Span> spans, SimTime period,
                               const AllocatorOptions& options, const DriverCosts& costs,
                               HostStalls& stalls, bool until_full) {
  const auto split = [&](auto predicate) {
    const auto begin = FindIf(spans, predicate);
    const auto end = std::find_if_not(begin, spans.end(), predicate);
    return spans.subspan(static_cast<std::size_t>(begin - spans.begin()),
                         static_cast<std::size_t>(end - begin));
  };
  const auto init = split([](const Span& s) { return s.body == BodyKind::kInit; });
  const auto first = split([](const Span& s) { return s.body != BodyKind::kInit && s.step == 0; });
  const auto last = split([](const Span& s) { return s.step > 0; });

  Replay replay(program, options, costs, until_full);
  HostStalls found;
  ReservedMemory result;
  found.init = replay.RunBody(init, 0, stalls.init);
  result.peak_init = replay.counters().peak_reserved;
  found.first_step = replay.RunBody(first, 0, stalls.first_step);
  result.peak_first = replay.counters().peak_reserved;
  result.retries_first = replay.retries();
  const std::size_t before_last = replay.noted();
  constexpr int kMostSteps = 4;
  const bool is_timed = period > SimTime();
  std::uint64_t last_hash = 0;
  for (int step = 0; step < kMostSteps && !replay.IsOver(); ++step) {
    const std::int64_t retries_before = replay.retries();
    const Bytes reserved_before = replay.counters().reserved;
    replay.ResetPeaks();
    replay.ForgetFrom(before_last);
    found.later_steps = replay.RunBody(last, step * period.value, stalls.later_steps);
    result.peak_steady = replay.counters().peak_reserved;
    result.retries_steady = replay.retries() - retries_before;
    if (replay.counters().reserved == reserved_before && result.retries_steady == 0) {
      break;
    }
    if (!is_timed && result.retries_steady > 0) {
      break;  // what the host waits for is not known
    }
    const std::uint64_t hash = replay.StateHash(step * period.value);
    if (step > 0 && hash == last_hash) {
      break;  // so would all others
    }
    last_hash = hash;
  }
  replay.Describe(result);
  if (replay.IsOver()) {
    result.peak_steady = std::max(result.peak_steady, replay.counters().peak_reserved);
    result.retries_steady = std::max(result.retries_steady, replay.retries());
  }
  result.timeline = replay.timeline();
  stalls = found;
  return result;
}

}  // namespace shardwright
