#include "schedule/verify.h"

#include <array>
#include <cstdint>
#include <string_view>
#include <utility>

#include "core/threads.h"
#include "schedule/happens_before.h"
#include "schedule/internal/check_means.h"
#include "schedule/internal/check_structure.h"
#include "schedule/internal/locate.h"
#include "schedule/print.h"

namespace shardwright {
namespace {

// An op of the concatenation, by its place in its stream; number 0 = none.
struct StreamPlace {
  Stream stream = Stream::kHost;
  std::int32_t number = 0;
};

enum class Life : std::uint8_t { kNone, kAllocated, kAllocatedOnce };

// What is known of a buffer's current allocation.
struct BufferState {
  Clock accesses;           // per stream, the last op that accessed it
  Clock earlier;            // the same for all earlier allocations of the buffer
  StreamPlace first_write;  // zero-filled buffers: number 0
  StreamPlace last_write;
  Life life = Life::kNone;
};

// A free that the next op on the buffer's owner stream must be ordered after.
struct FreedBuffer {
  BufferId buffer;
  Clock accesses;  // without those on recorded streams
};

bool HappensBefore(StreamPlace place, const Clock& clock) {
  return clock.Of(place.stream) >= place.number;
}

std::string_view Verb(AccessMode mode) {
  return mode == AccessMode::kRead ? "reads" : mode == AccessMode::kWrite ? "writes" : "updates";
}

// Rules 2 to 6, in one walk over the concatenation.
class LifeChecker {
 public:
  LifeChecker(const Program& program, std::vector<Finding>& findings)
      : program_(program),
        findings_(findings),
        passes_(ConcatenatedPasses(program)),
        walk_(program),
        states_(program.buffers.size()) {}

  void Run() {
    for (pass_ = 0; pass_ < passes_.size() && !IsFull(); ++pass_) {
      const Body& body = *passes_[pass_].body;
      walk_.BeginBody(body);
      for (std::size_t i = 0; i < body.size() && !IsFull(); ++i) {
        ThrowIfStopped();
        op_ = OpId(i);
        for (const MemoryPoint& point : body.PointsBefore(op_)) {
          CheckPoint(point);
        }
        const Clock& clock = walk_.Issue(op_);
        const Stream stream = program_.ShapeOf(body.ops[i]).stream;
        CheckFrees(stream, clock);
        for (const Access& access : body.AccessesOf(op_)) {
          CheckAccess(access, stream, clock);
        }
      }
      op_ = OpId(body.size());
      for (const MemoryPoint& point : body.PointsAtEnd()) {
        CheckPoint(point);
      }
      if (!IsFull()) {
        walk_.EndBody();
      }
    }
  }

 private:
  [[nodiscard]] bool IsFull() const { return findings_.size() >= kMaxFindings; }
  [[nodiscard]] Position Here() const { return {pass_, op_}; }
  [[nodiscard]] std::string NameHere() const { return NameAt(program_, passes_, Here()); }
  [[nodiscard]] std::string NameOf(StreamPlace place) const {
    return NameAt(program_, passes_, FindInStream(program_, passes_, place.stream, place.number));
  }

  void Report(int rule, std::string first, BufferId buffer, const std::string& text) {
    if (!IsFull()) {
      findings_.push_back({rule, std::move(first), NameHere(), BufferName(program_, buffer), text});
    }
  }

  void CheckPoint(const MemoryPoint& point) {
    BufferState& state = states_[point.buffer.value];
    if (point.kind == PointKind::kFree) {
      CheckFree(point, state);
      return;
    }
    const bool once = point.kind == PointKind::kAllocOnce;
    if (once && state.life == Life::kAllocatedOnce) {
      return;
    }
    if (state.life != Life::kNone) {
      const std::string first = NameOfPoint(point.buffer, /*is_free=*/false, &point);
      Report(2, first, point.buffer,
             BufferName(program_, point.buffer) + " is allocated again before " + NameHere() +
                 ", but was allocated before " + first + " and not freed since");
    }
    Clock earlier = state.earlier;
    earlier.Join(state.accesses);
    state = BufferState();
    state.earlier = earlier;
    state.life = once ? Life::kAllocatedOnce : Life::kAllocated;
  }

  void CheckFree(const MemoryPoint& point, BufferState& state) {
    if (state.life == Life::kAllocated) {
      QueueFree(point, state);
    } else if (state.life == Life::kAllocatedOnce) {
      const std::string first = NameOfPoint(point.buffer, /*is_free=*/false, &point);
      Report(2, first, point.buffer,
             BufferName(program_, point.buffer) + " is freed before " + NameHere() +
                 ", but is allocated once and for all before " + first);
    } else {
      const std::string first = NameOfPoint(point.buffer, /*is_free=*/true, &point);
      Report(2, first, point.buffer,
             BufferName(program_, point.buffer) + " is freed before " + NameHere() +
                 " while it does not exist; its free before that: " + first);
    }
    state.life = Life::kNone;
  }

  // Rule 6, first half: what the next op on the owner stream must come after, if it is not already
  // sure to.
  void QueueFree(const MemoryPoint& point, const BufferState& state) {
    const Stream owner = program_.buffers[point.buffer.value].owner;
    Clock accesses = state.accesses;
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      if (((point.recorded_streams >> s) & 1U) != 0) {
        accesses.count[s] = 0;
      }
    }
    if (!walk_.Next(owner).Covers(accesses)) {
      freed_[static_cast<std::size_t>(owner)].push_back({point.buffer, accesses});
    }
  }

  // Rule 6, second half, at the first op on `stream` after those frees.
  void CheckFrees(Stream stream, const Clock& clock) {
    std::vector<FreedBuffer>& freed = freed_[static_cast<std::size_t>(stream)];
    for (const FreedBuffer& entry : freed) {
      for (std::size_t s = 0; s < kStreamCount; ++s) {
        if (entry.accesses.count[s] <= clock.count[s]) {
          continue;
        }
        const std::string first = NameOf({static_cast<Stream>(s), entry.accesses.count[s]});
        Report(6, first, entry.buffer,
               BufferName(program_, entry.buffer) + " is freed, but its bytes may go to " +
                   NameHere() + " or later work of stream " +
                   std::string(shardwright::NameOf(stream)) + ", and nothing orders that after " +
                   first);
      }
    }
    freed.clear();
  }

  void CheckAccess(const Access& access, Stream stream, const Clock& clock) {
    BufferState& state = states_[access.buffer.value];
    if (state.life == Life::kNone) {
      ReportMissing(access);
      return;
    }
    if (access.mode != AccessMode::kWrite) {
      CheckRead(access, state, stream, clock);
    }
    if (!clock.Covers(state.earlier)) {
      ReportUnordered(access, state.earlier, clock);
    }
    if (access.mode == AccessMode::kRead) {
      CheckOrder(access, state.last_write, clock);
    } else {
      if (!clock.Covers(state.accesses)) {
        ReportUnordered(access, state.accesses, clock);
      }
      state.last_write = {stream, clock.Of(stream)};
      if (state.first_write.number == 0) {
        state.first_write = state.last_write;
      }
    }
    state.accesses.Of(stream) = clock.Of(stream);
  }

  // Rule 3.
  void ReportMissing(const Access& access) {
    const auto freed = FindPointBefore(passes_, access.buffer, /*is_free=*/true, Here(), nullptr);
    const auto allocated = FindFirstAlloc(passes_, access.buffer);
    const std::string first = freed       ? NameAt(program_, passes_, *freed)
                              : allocated ? NameAt(program_, passes_, *allocated)
                                          : std::string(kNoOp);
    Report(3, first, access.buffer,
           NameHere() + " " + std::string(Verb(access.mode)) + " " +
               BufferName(program_, access.buffer) + " while it does not exist; " +
               (freed       ? "it was freed before " + first
                : allocated ? "it is allocated only before " + first
                            : "nothing allocates it"));
  }

  // Rule 4. In a program that keeps rule 5 the first write comes before all others, so it alone
  // must come before the read.
  void CheckRead(const Access& access, const BufferState& state, Stream stream,
                 const Clock& clock) {
    if (program_.buffers[access.buffer.value].zero_filled) {
      return;
    }
    const StreamPlace write = state.first_write;
    const bool is_own = write.stream == stream && write.number == clock.Of(stream);
    if (write.number != 0 && !is_own && HappensBefore(write, clock)) {
      return;
    }
    const bool is_written = write.number != 0 && !is_own;
    const std::string first = is_written ? NameOf(write) : std::string(kNoOp);
    Report(4, first, access.buffer,
           NameHere() + " reads " + BufferName(program_, access.buffer) +
               (is_written ? ", but its first write, by " + first + ", need not happen before"
                           : " before any op has written it"));
  }

  // Rule 5 for one earlier access.
  void CheckOrder(const Access& access, StreamPlace earlier, const Clock& clock) {
    if (HappensBefore(earlier, clock)) {
      return;
    }
    const std::string first = NameOf(earlier);
    Report(5, first, access.buffer,
           NameHere() + " " + std::string(Verb(access.mode)) + " " +
               BufferName(program_, access.buffer) + ", which " + first +
               (access.mode == AccessMode::kRead ? " writes" : " accesses") +
               "; nothing orders the two");
  }

  void ReportUnordered(const Access& access, const Clock& earlier, const Clock& clock) {
    for (std::size_t s = 0; s < kStreamCount; ++s) {
      CheckOrder(access, {static_cast<Stream>(s), earlier.count[s]}, clock);
    }
  }

  // Names the last alloc or free of `buffer` before `self`.
  [[nodiscard]] std::string NameOfPoint(BufferId buffer, bool is_free,
                                        const MemoryPoint* self) const {
    const auto found = FindPointBefore(passes_, buffer, is_free, Here(), self);
    return found ? NameAt(program_, passes_, *found) : std::string(kNoOp);
  }

  const Program& program_;
  std::vector<Finding>& findings_;
  std::vector<Pass> passes_;
  ClockWalk walk_;
  std::vector<BufferState> states_;
  std::array<std::vector<FreedBuffer>, kStreamCount> freed_;
  std::size_t pass_ = 0;
  OpId op_;  // the op being checked; at the end of a body, its size
};

}  // namespace

std::vector<Finding> Verify(const Program& program) {
  std::vector<Finding> findings;
  CheckStructure(program, findings);
  if (!findings.empty()) {
    return findings;
  }
  CheckAccesses(program, findings);
  LifeChecker(program, findings).Run();
  if (findings.empty()) {
    CheckMeans(program, findings);
  }
  return findings;
}

}  // namespace shardwright
