// Expected values: by hand, and by walking many steps launch by launch.

#include "simulator/launch_queue.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"

namespace shardwright {
namespace {

struct OpTimes {
  Stream stream = Stream::kCompute;
  std::int64_t issue = 1;
  std::int64_t start = 0, end = 0;
  std::uint32_t kernels = 1;
};

// Ops with given device times, issued one right after the other from 0 on.
class Timeline {
 public:
  explicit Timeline(const std::vector<OpTimes>& ops, std::uint32_t step = 0) {
    ShapeInterner interner(program_);
    BodyBuilder init(program_, program_.init);
    init.Finish();
    BodyBuilder builder(program_, program_.step);
    std::int64_t host = 0;
    for (const OpTimes& op : ops) {
      OpShape shape;
      shape.stream = op.stream;
      shape.bytes = Bytes(static_cast<std::int64_t>(prices_.prices.size()));  // keeps shapes apart
      Span span;
      span.op = builder.Add({interner.Intern(shape)});
      span.step = step;
      span.stream = op.stream;
      span.issue_begin = SimTime(host);
      span.issued = SimTime(host + op.issue / op.kernels);
      span.issue_end = SimTime(host += op.issue);
      span.start = span.arrival = SimTime(op.start);
      span.end = SimTime(op.end);
      spans_.push_back(span);
      Price price;
      price.tail = SimTime((op.end - op.start) / op.kernels);
      prices_.prices.push_back(price);
    }
    builder.Finish();
    for (const Span& span : spans_) {
      program_.shapes[program_.step.ops[span.op.value].shape.value].kernel_count =
          ops[span.op.value].kernels;
    }
  }
  void Hold(std::int64_t period = 0, const HostStalls& stalls = {}) {
    HoldHostBack(program_, prices_, stalls, SimTime(period), spans_);
  }
  [[nodiscard]] std::int64_t Begin(std::size_t op) const { return spans_[op].issue_begin.value; }
  [[nodiscard]] std::int64_t End(std::size_t op) const { return spans_[op].issue_end.value; }
  [[nodiscard]] const std::vector<Span>& spans() const { return spans_; }
  void ReadLoss(std::int64_t loop_work) { prices_.loop_work = SimTime(loop_work); }

 private:
  Program program_;
  PriceTable prices_;
  std::vector<Span> spans_;
};

// `count` kernels of 100, the first from 10 on.
std::vector<OpTimes> Chain(std::int64_t count) {
  std::vector<OpTimes> ops;
  for (std::int64_t i = 0; i < count; ++i) {
    ops.push_back({Stream::kCompute, 1, 10 + 100 * i, 110 + 100 * i, 1});
  }
  return ops;
}

TEST_CASE("By hand: the next launch waits until the one 1,024 before it has ended") {
  Timeline timeline(Chain(3000));
  timeline.Hold();
  CHECK(timeline.Begin(1024) == 1024);            // the first ended at 110, long before
  CHECK(timeline.Begin(1040) == 110 + 100 * 16);  // and now the host waits each time
  CHECK(timeline.Begin(2999) == 110 + 100 * (2999 - 1024));
}

TEST_CASE("By hand: other streams have queues of their own, but one host") {
  std::vector<OpTimes> ops = Chain(1100);
  ops.push_back({Stream::kGather, 5, 300'000, 300'100, 1});
  Timeline timeline(ops);
  timeline.Hold();
  CHECK(timeline.Begin(1099) == 110 + 100 * (1099 - 1024));
  CHECK(timeline.Begin(1100) == timeline.Begin(1099) + 1);
}

TEST_CASE("By hand: an op of many kernels is issued while it runs") {
  // 2,024 kernels of 10: the last is launched when the 1,000th has ended, at 500 + 10,000.
  Timeline timeline({{Stream::kCompute, 2024, 500, 500 + 20'240, 2024}});
  timeline.Hold();
  CHECK(timeline.Begin(0) == 0);
  CHECK(timeline.End(0) == 10'500);
}

TEST_CASE("Where the device would wait, nothing changes") {
  // The copy starts at 1,150, but the host waits for the first kernel until 5,000 before it.
  std::vector<OpTimes> ops;
  for (std::int64_t i = 0; i < 1025; ++i) {
    ops.push_back({Stream::kCompute, 1, 10 + 4990 * i, 5000 + 4990 * i, 1});
  }
  ops.push_back({Stream::kGather, 1, 1150, 1200, 1});
  Timeline timeline(ops);
  const std::vector<Span> before = timeline.spans();
  timeline.Hold();
  CHECK(timeline.spans() == before);
}

TEST_CASE("A loop that reads the loss begins a step when the updates are over") {
  // Steps of 1,000: the last compute op of the step before ended at 1,010 - 1,000, of which the
  // loop's own work is the last 40.
  std::vector<OpTimes> ops = Chain(10);
  Timeline timeline(ops, 3);
  timeline.ReadLoss(40);
  timeline.Hold(1000);
  CHECK(timeline.Begin(0) == 0);  // the engine's host is later than -30
  for (OpTimes& op : ops) {
    op.start += 5000;
    op.end += 5000;
  }
  Timeline later(ops, 3);
  later.ReadLoss(40);
  later.Hold(1000);
  CHECK(later.Begin(0) == 5010 - 40);
  CHECK(later.Begin(9) == 5010 - 40 + 9);
}

TEST_CASE("A loop that reads the loss too late for an op is left out, the queue is not") {
  std::vector<OpTimes> ops = Chain(2000);
  for (OpTimes& op : ops) {
    op.start += 500'000;
    op.end += 500'000;
  }
  ops.insert(ops.begin(), {Stream::kGather, 1, 450'000, 450'100, 1});  // beside the updates before
  Timeline timeline(ops, 3);
  timeline.ReadLoss(40);
  timeline.Hold(200'000);
  CHECK(timeline.Begin(0) == timeline.End(2000) - 200'000);
  CHECK(timeline.Begin(2000) == 500'110 + 100 * (1999 - 1024));
}

TEST_CASE("What the allocator took from the host is taken behind a wait, too") {
  HostStalls stalls;
  stalls.first_step = {{OpId(1100u), SimTime(500)}};
  Timeline timeline(Chain(1200));
  timeline.Hold(0, stalls);
  CHECK(timeline.Begin(1099) == 110 + 100 * 75);
  CHECK(timeline.Begin(1100) == 110 + 100 * 75 + 1 + 500);
}

// The host times of the last of `steps` equal steps, one launch after the other.
std::vector<std::int64_t> WalkSteps(const std::vector<OpTimes>& ops, std::int64_t period,
                                    int steps) {
  std::vector<std::int64_t> ends[2];
  std::vector<std::int64_t> begins;
  std::int64_t host = std::int64_t{-1} << 60;
  for (int step = 0; step < steps; ++step) {
    begins.clear();
    for (const OpTimes& op : ops) {
      std::vector<std::int64_t>& of_stream = ends[op.stream == Stream::kCompute ? 0 : 1];
      if (of_stream.size() >= 1024) {
        host = std::max(host, of_stream[of_stream.size() - 1024]);
      }
      begins.push_back(host);
      host += op.issue;
      of_stream.push_back(op.end + (step - steps + 1) * period);
    }
  }
  return begins;
}

TEST_CASE("The last step's host is that of many steps walked one by one") {
  std::mt19937_64 random(20261126);
  int waited = 0;
  for (int round = 0; round < 60; ++round) {
    const auto draw = [&](std::int64_t low, std::int64_t high) {
      return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
    };
    const std::int64_t count = draw(3, 2500);
    std::vector<OpTimes> ops;
    std::int64_t now = std::int64_t{1} << 40;  // the engine's host is far ahead
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t length = draw(20, 200);
      const bool copies = draw(0, 5) == 0;
      ops.push_back(
          {copies ? Stream::kGather : Stream::kCompute, draw(1, 15), now, now + length, 1});
      now += length;
    }
    const std::int64_t period = now - ops.front().start;
    Timeline timeline(ops, 5);
    timeline.Hold(period);
    const std::vector<std::int64_t> expected =
        WalkSteps(ops, period, static_cast<int>(4000 / count) + 4);
    for (std::size_t i = 0; i < ops.size(); ++i) {
      REQUIRE(timeline.Begin(i) == expected[i]);
      waited += timeline.Begin(i) > 1'000'000 ? 1 : 0;
    }
  }
  CHECK(waited > 10'000);
}

}  // namespace
}  // namespace shardwright
