// The host's times under a queue of 1,024 launches per stream. The device's times stay as they are.
//
// Example: 5,000 kernels of 100 us each, issued in 5 us each. Without a limit the host has issued
// all of them after 25 ms, 475 ms before the device is done. With the queue it issues 1,024 kernels
// in 5 ms. From then on it issues one per 100 us, since a place is free only when the oldest one
// ends. The allocator's replay needs this: it decides how much earlier work is done when the host
// allocates.

#include "simulator/launch_queue.h"

#include <array>
#include <cstddef>
#include <limits>
#include <optional>
#include <span>

#include "core/ranges.h"

namespace shardwright {
namespace {

constexpr std::int64_t kLongAgo = std::numeric_limits<std::int64_t>::min() / 2;

struct HostTimes {
  std::int64_t begin = 0, first = 0, end = 0;
};

// The launches of one stream, in order.
class StreamLaunches {
 public:
  void Add(std::int64_t count, std::int64_t start, std::int64_t end) {
    ops_.push_back({total_, start, (end - start) / count});
    total_ += count;
  }

  // When launch `number` (from 0) ends, those of an op being of equal length. Numbers below 0 are
  // of the steps before, each `period` earlier; a period of 0: there were none. `at` is the op of
  // the number asked for before: within a step numbers ascend.
  [[nodiscard]] std::int64_t EndOf(std::int64_t number, std::int64_t period,
                                   std::size_t& at) const {
    std::int64_t shift = 0;
    if (number < 0) {
      if (period == 0) {
        return kLongAgo;
      }
      const std::int64_t steps = (-number + total_ - 1) / total_;
      shift = steps * period;
      number += steps * total_;
    }
    if (number < ops_[at].before) {
      at = 0;
    }
    while (at + 1 < ops_.size() && ops_[at + 1].before <= number) {
      ++at;
    }
    return ops_[at].start + ops_[at].each * (number - ops_[at].before + 1) - shift;
  }

 private:
  struct LaunchedOp {
    std::int64_t before, start, each;
  };

  std::vector<LaunchedOp> ops_;
  std::int64_t total_ = 0;
};

// Bodies that the host issues one after the other, or the last step, which repeats.
class Stretch {
 public:
  Stretch(const Program& program, const PriceTable& prices, std::span<const Span> spans,
          std::int64_t period)
      : program_(program), prices_(prices), spans_(spans), period_(period) {
    launches_.reserve(spans.size());
    for (const Span& span : spans) {
      launches_.push_back(LaunchesOf(span));
      if (const std::int64_t count = launches_.back()) {
        StreamOf(span).Add(count, span.start.value, span.end.value);
      }
      if (span.stream == Stream::kCompute) {
        computed_ = std::max(computed_, span.end.value);
      }
    }
  }

  // The host's times by both rules, or by the queue's alone; none where the device would wait.
  [[nodiscard]] std::optional<std::vector<HostTimes>> Find(const HostStalls& stalls,
                                                           bool reads_loss) const {
    const bool waits = reads_loss && period_ > 0 && prices_.loop_work.value > 0;
    const std::int64_t loop = waits ? computed_ - period_ - prices_.loop_work.value : kLongAgo;
    std::int64_t host = loop;
    std::vector<HostTimes> times;
    // When the host begins a step follows from when it ended the one before.
    for (int round = 0; round < kMostRounds; ++round) {
      times.clear();
      if (!Walk(host, stalls, times)) {
        return std::nullopt;
      }
      const std::int64_t next = std::max(loop, times.back().end - period_);
      if (period_ == 0 || next <= host) {
        return times;
      }
      host = next;
    }
    return std::nullopt;
  }

 private:
  static constexpr int kMostRounds = 8;

  [[nodiscard]] ShapeId ShapeOf(const Span& span) const {
    return BodyOf(program_, span.body).ops[span.op.value].shape;
  }
  [[nodiscard]] std::int64_t LaunchesOf(const Span& span) const {
    if (span.stream == Stream::kHost) {
      return 0;
    }
    const std::int64_t kernels = program_.shapes[ShapeOf(span).value].kernel_count;
    return kernels > 0 ? kernels : span.end > span.start ? 1 : 0;
  }
  [[nodiscard]] std::int64_t TailOf(const Span& span) const {
    return prices_.prices[ShapeOf(span).value].tail.value;
  }
  StreamLaunches& StreamOf(const Span& span) {
    return streams_[static_cast<std::size_t>(span.stream)];
  }

  // False: an op could not start or end when it does.
  [[nodiscard]] bool Walk(std::int64_t host, const HostStalls& stalls,
                          std::vector<HostTimes>& times) const {
    std::array<std::int64_t, kStreamCount> launched{};
    std::array<std::size_t, kStreamCount> at{};
    times.reserve(spans_.size());
    std::size_t stall = 0;
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      const Span& span = spans_[i];
      if (i > 0 && spans_[i - 1].body != span.body) {
        stall = 0;
      }
      host += StallBefore(span, stalls, stall);
      HostTimes time{std::max(host, span.issue_begin.value), 0, 0};
      if (span.stream == Stream::kHost) {
        time.first = time.end = time.begin;
        if (time.begin > span.start.value) {
          return false;
        }
        host = span.end.value;
      } else {
        const auto s = static_cast<std::size_t>(span.stream);
        if (!Launch(i, streams_[s], launched[s], at[s], time)) {
          return false;
        }
        host = time.end;
      }
      times.push_back(time);
    }
    return true;
  }

  [[nodiscard]] std::int64_t StallBefore(const Span& span, const HostStalls& stalls,
                                         std::size_t& next) const {
    const std::vector<HostStall>& of_body = span.body == BodyKind::kInit ? stalls.init
                                            : span.step == 0             ? stalls.first_step
                                                                         : stalls.later_steps;
    std::int64_t time = 0;
    for (; next < of_body.size() && of_body[next].before_op.value <= span.op.value; ++next) {
      time += of_body[next].time.value;
    }
    return time;
  }

  bool Launch(std::size_t index, const StreamLaunches& stream, std::int64_t& launched,
              std::size_t& at, HostTimes& time) const {
    const Span& span = spans_[index];
    const std::int64_t count = launches_[index];
    if (count > 0) {
      time.begin = std::max(time.begin, stream.EndOf(launched - kLaunchQueue, period_, at));
    }
    time.first = time.begin + (span.issued - span.issue_begin).value;
    time.end = time.begin + (span.issue_end - span.issue_begin).value;
    if (count > 0) {
      launched += count;
      time.end = std::max(time.end, stream.EndOf(launched - 1 - kLaunchQueue, period_, at));
    }
    const bool is_late = time.first >= span.start.value && time.first > span.issued.value;
    return !is_late &&
           (time.end <= span.issue_end.value || time.end + TailOf(span) < span.end.value);
  }

  const Program& program_;
  const PriceTable& prices_;
  std::span<const Span> spans_;
  std::int64_t period_;
  std::vector<std::int64_t> launches_;  // by span
  std::array<StreamLaunches, kStreamCount> streams_;
  std::int64_t computed_ = kLongAgo;  // when the last compute op ends
};

}  // namespace

void HoldHostBack(const Program& program, const PriceTable& prices, const HostStalls& stalls,
                  SimTime period, std::vector<Span>& spans) {
  const auto last = FindIf(spans, [](const Span& s) { return s.step > 0; });
  const std::span<Span> all(spans);
  const auto count = static_cast<std::size_t>(last - spans.begin());
  const std::span<Span> first_part = all.first(count);
  const std::span<Span> last_part = all.subspan(count);
  const auto hold = [&](std::span<Span> part, std::int64_t repeats_after) {
    if (part.empty()) {
      return;
    }
    const Stretch stretch(program, prices, part, repeats_after);
    std::optional<std::vector<HostTimes>> times = stretch.Find(stalls, true);
    if (!times) {
      times = stretch.Find(stalls, false);
    }
    for (std::size_t i = 0; times && i < part.size(); ++i) {
      part[i].issue_begin = SimTime((*times)[i].begin);
      part[i].issued = SimTime((*times)[i].first);
      part[i].issue_end = SimTime((*times)[i].end);
    }
  };
  hold(first_part, 0);
  if (period.value > 0) {
    hold(last_part, period.value);
  }
}

}  // namespace shardwright
