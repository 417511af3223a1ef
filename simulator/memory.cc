#include "simulator/memory.h"

#include <algorithm>

#include "core/error.h"

namespace shardwright {
namespace {

// Bytes that exist, on the device (side 0) and on the host (side 1).
struct Existing {
  std::array<std::array<std::int64_t, kCategoryCount>, 2> bytes{};
  std::array<std::int64_t, 2> total{};
};

struct Peak {
  std::int64_t total = 0;
  std::array<std::int64_t, kCategoryCount> bytes{};
  BodyKind body = BodyKind::kInit;
  std::uint32_t before_op = OpId::kNoneValue;
};

// Walks bodies in host order and keeps the highest moment.
class Walk {
 public:
  Walk(const Program& program, bool periodic, std::vector<std::uint8_t>& allocated_once)
      : program_(program), periodic_(periodic), allocated_once_(allocated_once) {
    allocated_once_.assign(program.buffers.size(), 0);
  }

  void RunBody(const Body& body, BodyKind kind) {
    body_ = &body;
    kind_ = kind;
    cursor_ = 0;
    RunRange(0, static_cast<std::uint32_t>(body.size()));
    Apply(body.PointsAtEnd(), OpId::kNoneValue);
  }
  // Peaks are counted anew from what exists now.
  void StartPeaks(BodyKind kind) {
    for (std::size_t side = 0; side < 2; ++side) {
      peaks_[side] = PeakNow(side, body_ == nullptr || body_->ops.empty() ? OpId::kNoneValue : 0);
      peaks_[side].body = kind;
    }
  }
  [[nodiscard]] MemoryPeak PeakOf(std::size_t side) const {
    const Peak& peak = peaks_[side];
    MemoryPeak result;
    result.total = Bytes(peak.total);
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      result.by_category[c] = Bytes(peak.bytes[c]);
    }
    result.body = peak.body;
    result.before_op = OpId(peak.before_op);
    return result;
  }
  [[nodiscard]] const Existing& existing() const { return now_; }
  void Apply(std::span<const MemoryPoint> points, std::uint32_t before_op);

 private:
  [[nodiscard]] Peak PeakNow(std::size_t side, std::uint32_t before_op) const {
    return {now_.total[side], now_.bytes[side], kind_, before_op};
  }
  void RunRange(std::uint32_t begin, std::uint32_t end);
  void RunRepeat(const Repeat& repeat);
  void Advance(std::uint32_t begin, std::uint32_t end) {
    for (std::uint32_t i = begin; i < end; ++i) {
      Apply(body_->PointsBefore(OpId(i)), i);
    }
  }

  const Program& program_;
  bool periodic_;
  std::vector<std::uint8_t>& allocated_once_;
  const Body* body_ = nullptr;
  BodyKind kind_ = BodyKind::kInit;
  std::size_t cursor_ = 0;
  Existing now_;
  std::array<Peak, 2> peaks_;
};

void Walk::Apply(std::span<const MemoryPoint> points, std::uint32_t before_op) {
  for (const MemoryPoint& point : points) {
    const Buffer& buffer = program_.buffers[point.buffer.value];
    const std::size_t side = buffer.on_host ? 1 : 0;
    std::int64_t& bytes = now_.bytes[side][static_cast<std::size_t>(buffer.category)];
    if (point.kind == PointKind::kFree) {
      bytes -= buffer.size.value;
      now_.total[side] -= buffer.size.value;
      continue;
    }
    if (point.kind == PointKind::kAllocOnce) {
      if (allocated_once_[point.buffer.value] != 0) {
        continue;
      }
      allocated_once_[point.buffer.value] = 1;
    }
    bytes += buffer.size.value;
    now_.total[side] += buffer.size.value;
    if (now_.total[side] > peaks_[side].total) {
      peaks_[side] = PeakNow(side, before_op);
    }
  }
}

// All copies have equal points, so each one adds what the first one adds; the highest moment is in
// the first copy, or in the last one if copies leave something behind.
void Walk::RunRepeat(const Repeat& repeat) {
  const std::array<Peak, 2> peaks_before = peaks_;
  const Existing before = now_;
  for (std::size_t side = 0; side < 2; ++side) {
    peaks_[side] = PeakNow(side, repeat.first);
  }
  RunRange(repeat.first, repeat.first + repeat.period);
  const auto more = static_cast<std::int64_t>(repeat.count) - 1;
  for (std::size_t side = 0; side < 2; ++side) {
    const std::int64_t growth = now_.total[side] - before.total[side];
    Peak highest = peaks_before[side];
    if (peaks_[side].total > highest.total) {
      highest = peaks_[side];
    }
    if (peaks_[side].total + more * growth > highest.total) {
      highest = peaks_[side];
      highest.total += more * growth;
      highest.before_op += static_cast<std::uint32_t>(more) * repeat.period;
      for (std::size_t c = 0; c < kCategoryCount; ++c) {
        highest.bytes[c] += more * (now_.bytes[side][c] - before.bytes[side][c]);
      }
    }
    peaks_[side] = highest;
    now_.total[side] += more * growth;
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      now_.bytes[side][c] += more * (now_.bytes[side][c] - before.bytes[side][c]);
    }
  }
  const std::uint32_t end = repeat.first + repeat.period * repeat.count;
  while (cursor_ < body_->repeats.size() && body_->repeats[cursor_].first < end) {
    ++cursor_;
  }
}

void Walk::RunRange(std::uint32_t begin, std::uint32_t end) {
  std::uint32_t position = begin;
  while (periodic_ && cursor_ < body_->repeats.size() && body_->repeats[cursor_].first < end) {
    const Repeat& repeat = body_->repeats[cursor_++];
    Advance(position, repeat.first);
    RunRepeat(repeat);
    position = repeat.first + repeat.period * repeat.count;
  }
  Advance(position, end);
}

const Body& FirstStep(const Program& program) {
  return program.warmup.ops.empty() ? program.step : program.warmup;
}

}  // namespace

const MemoryPeak& AllocatedMemory::DevicePeak() const {
  return device_steady.total > device_first.total ? device_steady : device_first;
}

const MemoryPeak& AllocatedMemory::HostPeak() const {
  return host_steady.total > host_first.total ? host_steady : host_first;
}

AllocatedMemory MeasureAllocated(const Program& program, bool periodic,
                                 MemoryWorkspace& workspace) {
  Walk walk(program, periodic, workspace.allocated_once);
  AllocatedMemory result;
  walk.RunBody(program.init, BodyKind::kInit);
  const bool has_warmup = !program.warmup.ops.empty();
  walk.RunBody(FirstStep(program), has_warmup ? BodyKind::kWarmup : BodyKind::kStep);
  result.device_first = walk.PeakOf(0);
  result.host_first = walk.PeakOf(1);
  if (has_warmup) {
    walk.RunBody(program.step, BodyKind::kStep);  // may still allocate for the first time
  }
  walk.StartPeaks(BodyKind::kStep);
  walk.RunBody(program.step, BodyKind::kStep);
  result.device_steady = walk.PeakOf(0);
  result.host_steady = walk.PeakOf(1);
  return result;
}

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
  std::sort(buffers.begin(), buffers.end(), [&](std::uint32_t a, std::uint32_t b) {
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
      finder.Run(FirstStep(program), first_kind, is_first);
  for (int steps = has_warmup ? 2 : 1; !found && steps > 0; --steps) {
    found = finder.Run(program.step, BodyKind::kStep, steps == 1);
  }
  SW_CHECK(found, "the peak is not one of this program");
  return finder.Existing();
}

void AppendMemorySamples(const Program& program, std::span<const Span> spans,
                         std::vector<MemorySample>& samples) {
  std::vector<std::uint8_t> allocated_once;
  Walk walk(program, false, allocated_once);
  const auto add = [&](const Span& at, SimTime time) {
    MemorySample sample;
    sample.step = at.step;
    sample.rank = at.rank;
    sample.time = time;
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      sample.device[c] = Bytes(walk.existing().bytes[0][c]);
      sample.host[c] = Bytes(walk.existing().bytes[1][c]);
    }
    samples.push_back(sample);
  };
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const Span& span = spans[i];
    const Body& body = span.body == BodyKind::kInit     ? program.init
                       : span.body == BodyKind::kWarmup ? program.warmup
                                                        : program.step;
    const auto points = body.PointsBefore(span.op);
    walk.Apply(points, span.op.value);
    if (!points.empty()) {
      add(span, span.issue_begin);
    }
    if (span.op.value + 1 == body.size() && !body.PointsAtEnd().empty()) {
      walk.Apply(body.PointsAtEnd(), OpId::kNoneValue);
      add(span, span.issue_end);
    }
  }
}

}  // namespace shardwright
