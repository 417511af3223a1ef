// Walks the alloc and free points of a program in host order and keeps the highest sums.
//
// Example: init allocates 10 (masters). The step allocates 4, then 6 with alloc_once (optimizer
// states), then frees the 4. The first step peaks at 10 + 4 + 6 = 20. Later steps begin with 16 and
// allocate the 4 only: they peak at 20 as well, but at another op. One walk finds both, as the
// points of the second run are those of the first without the alloc_once points.
//
// No clock is needed: a buffer exists from the host's call to the host's call. O(points).

#include "simulator/memory.h"

#include "core/ranges.h"
#include "core/threads.h"

namespace shardwright {
namespace {

// Bytes, in all and by category.
struct Amount {
  std::int64_t total = 0;
  std::array<std::int64_t, kCategoryCount> bytes{};

  void Add(Category category, std::int64_t size) {
    total += size;
    bytes[static_cast<std::size_t>(category)] += size;
  }
  // *this += after - before.
  void AddDifference(const Amount& before, const Amount& after) {
    total += after.total - before.total;
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      bytes[c] += after.bytes[c] - before.bytes[c];
    }
  }
};
using Sides = std::array<Amount, 2>;  // on the device and on the host

struct Peak {
  Amount amount;
  BodyKind body = BodyKind::kInit;
  std::uint32_t before_op = OpId::kNoneValue;
  const MemoryPoint* point = nullptr;  // stands before it; null once before_op is set
  bool lacks_categories = false;       // nothing has gone since, so they are those of now
};

// Walks bodies in host order and keeps the highest moments: those of what exists, and those of what
// would exist without the body's own alloc_once points. In the body's next run these points do
// nothing, so the second kind of moments is that run's, less the memory that it finds at its begin.
// One walk of the step therefore tells of the first step and of the steady one.
class Walk {
 public:
  Walk(const Program& program, MemoryWorkspace& workspace)
      : program_(program), workspace_(workspace) {
    ++workspace_.call;
    if (workspace_.made_in.size() < program.buffers.size()) {
      workspace_.made_in.resize(program.buffers.size());
    }
  }

  void RunBody(const Body& body, BodyKind kind) {
    body_ = &body;
    kind_ = kind;
    at_begin_ = now_;
    once_ = Sides();
    for (std::size_t side = 0; side < 2; ++side) {
      peaks_[kNext][side] = PeakNow(kNext, side, body.ops.empty() ? OpId::kNoneValue : 0);
    }
    Apply(body.points);
    Settle();
  }
  // The highest moment of all bodies so far.
  [[nodiscard]] MemoryPeak PeakSoFar(std::size_t side) const {
    return ToMemoryPeak(peaks_[kSoFar][side]);
  }
  // The highest moment of the last body's next run.
  [[nodiscard]] MemoryPeak PeakOfNext(std::size_t side) const {
    Peak peak = peaks_[kNext][side];
    peak.amount.AddDifference(at_begin_[side], now_[side]);
    return ToMemoryPeak(peak);
  }
  [[nodiscard]] const Sides& existing() const { return now_; }
  void Apply(std::span<const MemoryPoint> points);
  [[nodiscard]] std::int64_t SizeOf(const Buffer& buffer) const;

 private:
  enum Reading : std::size_t { kSoFar, kNext, kReadingCount };

  [[nodiscard]] static MemoryPeak ToMemoryPeak(const Peak& peak) {
    MemoryPeak result;
    result.total = Bytes(peak.amount.total);
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      result.by_category[c] = Bytes(peak.amount.bytes[c]);
    }
    result.body = peak.body;
    result.before_op = OpId(peak.before_op);
    return result;
  }
  [[nodiscard]] Peak PeakNow(Reading reading, std::size_t side, std::uint32_t before_op) const {
    Peak peak{now_[side], kind_, before_op};
    if (reading == kNext) {
      peak.amount.AddDifference(once_[side], Amount());
    }
    return peak;
  }
  void NotePeaks(std::size_t side, const MemoryPoint& point);
  void SettleCategories();
  void Settle();
  [[nodiscard]] std::uint32_t OpBehind(const MemoryPoint& point) const;

  const Program& program_;
  MemoryWorkspace& workspace_;
  const Body* body_ = nullptr;
  BodyKind kind_ = BodyKind::kInit;
  Sides now_;
  Sides at_begin_;  // of the body
  Sides once_;      // added by alloc_once points of the body
  std::array<std::array<Peak, 2>, kReadingCount> peaks_;
  bool is_rising_ = false;  // some peak lacks its categories
};

// Called when bytes have been added.
void Walk::NotePeaks(std::size_t side, const MemoryPoint& point) {
  const auto note = [&](Peak& peak, std::int64_t total) {
    if (total > peak.amount.total) {
      peak.amount.total = total;
      peak.point = &point;
      peak.lacks_categories = is_rising_ = true;
    }
  };
  note(peaks_[kSoFar][side], now_[side].total);
  note(peaks_[kNext][side], now_[side].total - once_[side].total);
}

// Called before bytes go.
void Walk::SettleCategories() {
  is_rising_ = false;
  for (const Reading reading : {kSoFar, kNext}) {
    for (std::size_t side = 0; side < 2; ++side) {
      Peak& peak = peaks_[reading][side];
      if (peak.lacks_categories) {
        peak.amount = PeakNow(reading, side, peak.before_op).amount;
        peak.lacks_categories = false;
      }
    }
  }
}

void Walk::Settle() {
  SettleCategories();
  for (auto& peaks : peaks_) {
    for (Peak& peak : peaks) {
      if (peak.point != nullptr) {
        peak.before_op = OpBehind(*peak.point);
        peak.body = kind_;
        peak.point = nullptr;
      }
    }
  }
}

// On the host page-locked blocks are larger than what they hold.
std::int64_t Walk::SizeOf(const Buffer& buffer) const {
  if (!buffer.on_host || buffer.pieces.count == 0) {
    return buffer.size.value;
  }
  const Bytes sum = Summed<Bytes>(program_.PiecesOf(buffer));
  return sum.value;
}

void Walk::Apply(std::span<const MemoryPoint> points) {
  const Buffer* const buffers = program_.buffers.data();
  for (const MemoryPoint& point : points) {
    const Buffer& buffer = buffers[point.buffer.value];
    const std::size_t side = buffer.on_host ? 1 : 0;
    const std::int64_t size = SizeOf(buffer);
    if (point.kind == PointKind::kFree) {
      if (is_rising_) {
        SettleCategories();
      }
      now_[side].Add(buffer.category, -size);
      continue;
    }
    if (point.kind == PointKind::kAllocOnce) {
      std::uint64_t& made_in = workspace_.made_in[point.buffer.value];
      if (made_in == workspace_.call) {
        continue;
      }
      made_in = workspace_.call;
      once_[side].Add(buffer.category, size);
    }
    now_[side].Add(buffer.category, size);
    NotePeaks(side, point);
  }
}

// The op that a point of the body stands before; none for those at its end.
std::uint32_t Walk::OpBehind(const MemoryPoint& point) const {
  const std::vector<Op>& ops = body_->ops;
  const auto index = static_cast<std::uint32_t>(&point - body_->points.data());
  if (index >= body_->end_point_begin) {
    return OpId::kNoneValue;
  }
  const auto behind =
      std::upper_bound(ops.begin(), ops.end(), index,
                       [](std::uint32_t value, const Op& op) { return value < op.point_begin; });
  return static_cast<std::uint32_t>(behind - ops.begin()) - 1;
}

}  // namespace

const MemoryPeak& AllocatedMemory::DevicePeak() const {
  return device_steady.total > device_first.total ? device_steady : device_first;
}

const MemoryPeak& AllocatedMemory::HostPeak() const {
  return host_steady.total > host_first.total ? host_steady : host_first;
}

AllocatedMemory MeasureAllocated(const Program& program, MemoryWorkspace& workspace) {
  Walk walk(program, workspace);
  AllocatedMemory result;
  walk.RunBody(program.init, BodyKind::kInit);
  result.device_init = walk.PeakSoFar(0);
  result.host_init = walk.PeakSoFar(1);
  const bool has_warmup = !program.warmup.ops.empty();
  walk.RunBody(has_warmup ? program.warmup : program.step,
               has_warmup ? BodyKind::kWarmup : BodyKind::kStep);
  result.device_first = walk.PeakSoFar(0);
  result.host_first = walk.PeakSoFar(1);
  if (has_warmup) {
    walk.RunBody(program.step, BodyKind::kStep);  // may still allocate for the first time
  }
  result.device_steady = walk.PeakOfNext(0);
  result.host_steady = walk.PeakOfNext(1);
  return result;
}

void AppendMemorySamples(const Program& program, std::span<const Span> spans,
                         std::vector<MemorySample>& samples) {
  MemoryWorkspace workspace;
  Walk walk(program, workspace);
  const auto add = [&](const Span& at, SimTime time) {
    MemorySample sample;
    sample.step = at.step;
    sample.rank = at.rank;
    sample.time = time;
    for (std::size_t c = 0; c < kCategoryCount; ++c) {
      sample.device[c] = Bytes(walk.existing()[0].bytes[c]);
      sample.host[c] = Bytes(walk.existing()[1].bytes[c]);
    }
    samples.push_back(sample);
  };
  for (std::size_t i = 0; i < spans.size(); ++i) {
    ThrowIfStopped();
    const Span& span = spans[i];
    const Body& body = BodyOf(program, span.body);
    const auto points = body.PointsBefore(span.op);
    walk.Apply(points);
    if (!points.empty()) {
      add(span, span.issue_begin);
    }
    if (span.op.value + 1 == body.size() && !body.PointsAtEnd().empty()) {
      walk.Apply(body.PointsAtEnd());
      add(span, span.issue_end);
    }
  }
}

}  // namespace shardwright
