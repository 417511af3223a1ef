// Which buffers make up a peak of allocated memory; see memory.h.
//
// Example: a (10 MiB) and b (20 MiB) are allocated, a is freed, c (5 MiB) is allocated. The peak is
// 30 MiB behind the point of b. The finder repeats the points up to there and lists b, then a, the
// largest first, each with the op before which it was allocated.
//
// A peak of a steady step may hold buffers of the step before, such as gradients that wait, so one
// more step runs before the one with the peak. O(points log buffers).

#include <string>

#include "core/error.h"
#include "core/ranges.h"
#include "simulator/memory.h"

namespace shardwright {
namespace {

// Repeats the points up to a peak and remembers who allocated what exists.
class PeakFinder {
 public:
  PeakFinder(const Program& program, const MemoryPeak& peak)
      : program_(program), peak_(peak), owners_(program.buffers.size()) {}

  // Runs a body; true when the peak was met, which can only be if `has_peak`.
  bool Run(const Body& body, BodyKind kind, bool has_peak) {
    const auto size = static_cast<std::uint32_t>(body.size());
    for (std::uint32_t i = 0; i < size; ++i) {
      const Place place{&body, kind, i, has_peak && peak_.before_op.value == i};
      if (Apply(body.PointsBefore(OpId(i)), place)) {
        return true;
      }
    }
    return Apply(body.PointsAtEnd(),
                 {&body, kind, OpId::kNoneValue, has_peak && !peak_.before_op.valid()});
  }

  [[nodiscard]] std::vector<PeakBuffer> Existing() const;

 private:
  struct Place {
    const Body* body = nullptr;  // null: the buffer does not exist
    BodyKind kind = BodyKind::kInit;
    std::uint32_t op = 0;
    bool has_peak = false;
    std::uint64_t order = 0;
  };

  bool Apply(std::span<const MemoryPoint> points, const Place& place) {
    if (place.has_peak && total_ == peak_.total.value) {
      return true;
    }
    for (const MemoryPoint& point : points) {
      const Buffer& buffer = program_.buffers[point.buffer.value];
      const std::int64_t size = buffer.on_host ? 0 : buffer.size.value;
      Place& owner = owners_[point.buffer.value];
      if (point.kind == PointKind::kFree) {
        owner.body = nullptr;
        total_ -= size;
      } else if (owner.body == nullptr) {
        owner = place;
        owner.order = order_++;
        total_ += size;
      }
      if (place.has_peak && total_ == peak_.total.value) {
        return true;
      }
    }
    return false;
  }

  const Program& program_;
  const MemoryPeak& peak_;
  std::vector<Place> owners_;  // by buffer
  std::uint64_t order_ = 0;
  std::int64_t total_ = 0;  // on the device
};

std::vector<PeakBuffer> PeakFinder::Existing() const {
  std::vector<std::uint32_t> buffers;
  for (std::uint32_t b = 0; b < owners_.size(); ++b) {
    const Buffer& buffer = program_.buffers[b];
    if (owners_[b].body != nullptr && !buffer.on_host && buffer.size.value > 0) {
      buffers.push_back(b);
    }
  }
  SortAll(buffers, [&](std::uint32_t a, std::uint32_t b) {
    const Bytes size_a = program_.buffers[a].size;
    const Bytes size_b = program_.buffers[b].size;
    return size_a != size_b ? size_a > size_b : owners_[a].order < owners_[b].order;
  });
  std::vector<PeakBuffer> result;
  for (const std::uint32_t b : buffers) {
    const Place& owner = owners_[b];
    const std::string op = owner.op == OpId::kNoneValue
                               ? std::string("end")
                               : OpName(program_, owner.body->ops[owner.op]);
    result.push_back(
        {BufferId(b), program_.buffers[b].size, program_.buffers[b].category, op, owner.kind});
  }
  return result;
}

}  // namespace

std::vector<PeakBuffer> ExplainPeak(const Program& program, const MemoryPeak& peak, bool is_first) {
  PeakFinder finder(program, peak);
  const bool has_warmup = !program.warmup.ops.empty();
  const BodyKind first_kind = has_warmup ? BodyKind::kWarmup : BodyKind::kStep;
  bool found =
      finder.Run(program.init, BodyKind::kInit, is_first && peak.body == BodyKind::kInit) ||
      finder.Run(has_warmup ? program.warmup : program.step, first_kind, is_first);
  for (int steps = has_warmup ? 2 : 1; !found && steps > 0; --steps) {
    found = finder.Run(program.step, BodyKind::kStep, steps == 1);
  }
  SW_CHECK(found, "the peak is not one of this program");
  return finder.Existing();
}

}  // namespace shardwright
