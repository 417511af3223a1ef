// Attribution adds up exactly on random programs, and says what a reader can see by hand on a small
// one.

#include "simulator/attribution.h"

#include <cstdint>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "simulator/device_time.h"
#include "simulator/engine.h"
#include "tests/simulator/random_program.h"

namespace shardwright {
namespace {

std::int64_t Sum(const std::vector<TimeShare>& shares) {
  std::int64_t sum = 0;
  for (const TimeShare& share : shares) {
    sum += share.time.value;
  }
  return sum;
}

TEST_CASE("Busy and idle time of the compute stream, and the critical path, add up to the step") {
  EngineWorkspace workspace;
  int explained = 0;
  for (std::uint64_t seed = 1; seed <= 400; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {4, 2, 5, seed % 2 == 0});
    EngineOptions options;
    options.contention = seed % 2 == 0;
    std::vector<Span> spans;
    const EngineResult result =
        RunEngineWithSpans(random.program, random.prices, options, workspace, spans);
    if (!result.is_steady) {
      continue;
    }
    const Attribution why = Explain(random.program, spans, result.steady.time);
    // The path is a chain of touching stretches over exactly one period.
    REQUIRE(!why.critical_path.empty());
    SimTime position = why.critical_path.front().begin;
    for (const PathSegment& segment : why.critical_path) {
      CHECK(segment.begin == position);
      CHECK(segment.end > segment.begin);
      position = segment.end;
    }
    CHECK(position - why.critical_path.front().begin == result.steady.time);
    CHECK(Sum(why.critical) == result.steady.time.value);
    if (options.contention) {
      continue;  // rounding lets two steps differ by picoseconds
    }
    // The engine's own split, by stream, fills the same time. (Where the compute stream has no ops,
    // or never has to wait for a slower stream, its own period is shorter than the step's.)
    std::int64_t busy_and_idle =
        result.steady.busy[static_cast<std::size_t>(Stream::kCompute)].value;
    for (const SimTime time : result.steady.compute_idle) {
      busy_and_idle += time.value;
    }
    if (busy_and_idle == result.steady.time.value) {
      CHECK(why.compute_busy.value + Sum(why.idle) == result.steady.time.value);
      ++explained;
    }
  }
  CHECK(explained > 100);
}

// Per step: an all-gather of 500, then compute of 300 that waits for it; the gather waits for the
// compute of the step before.
TEST_CASE("A gather that nothing hides is charged in full") {
  Program program;
  program.groups = {{"shard", 8, 1}};
  ShapeInterner interner(program);
  OpShape gather;
  gather.code = OpCode::kAllGather;
  gather.stream = Stream::kGather;
  gather.group = GroupId(0);
  const ShapeId gather_id = interner.Intern(gather);
  const ShapeId compute_id = interner.Intern(OpShape{});
  BodyBuilder init(program, program.init);
  init.Finish();
  BodyBuilder step(program, program.step);
  const OpId first = step.Add({gather_id, Phase::kForward, 0});
  step.AfterSlot(0);
  const OpId second = step.Add({compute_id});
  step.After(first);
  step.SetCarry(0, second);
  step.Finish();
  PriceTable prices;
  prices.prices.resize(2);
  prices.prices[gather_id.value].duration = SimTime(500);
  prices.prices[compute_id.value].duration = SimTime(300);
  prices.prices[compute_id.value].issue = SimTime(20);
  prices.prices[compute_id.value].first_launch = SimTime(20);

  EngineOptions options;
  options.contention = false;
  EngineWorkspace workspace;
  std::vector<Span> spans;
  const EngineResult result = RunEngineWithSpans(program, prices, options, workspace, spans);
  REQUIRE(result.is_steady);
  CHECK(result.steady.time == SimTime(800));
  CHECK(result.steady.ExposedCommunication() == SimTime(500));
  const Attribution why = Explain(program, spans, result.steady.time);
  CHECK(why.compute_busy == SimTime(300));
  REQUIRE(why.idle.size() == 1);
  CHECK(why.idle[0].code == OpCode::kAllGather);
  CHECK(why.idle[0].unit == 0);
  CHECK(why.idle[0].time == SimTime(500));
  REQUIRE(why.critical_path.size() == 2);
  CHECK(why.critical_path[0].op == first);
  CHECK(why.critical_path[1].op == second);
}

// A step of two equal kernels without edges.
struct TwoKernels {
  TwoKernels(SimTime duration, SimTime issue) {
    ShapeInterner interner(program);
    const ShapeId id = interner.Intern(OpShape{});
    BodyBuilder init(program, program.init);
    init.Finish();
    BodyBuilder step(program, program.step);
    (void)step.Add({id});
    second = step.Add({id});
    step.Finish();
    prices.prices.resize(1);
    prices.prices[0].duration = duration;
    prices.prices[0].issue = prices.prices[0].first_launch = issue;
  }

  Program program;
  PriceTable prices;
  OpId second;
};

TEST_CASE("A host that cannot keep up is what the critical path shows") {
  // Two kernels of 10, each issued in 100: the period is 200, all of it the host's.
  const TwoKernels p(SimTime(10), SimTime(100));
  EngineOptions options;
  options.contention = false;
  EngineWorkspace workspace;
  std::vector<Span> spans;
  const EngineResult result = RunEngineWithSpans(p.program, p.prices, options, workspace, spans);
  REQUIRE(result.is_steady);
  CHECK(result.steady.time == SimTime(200));
  const Attribution why = Explain(p.program, spans, result.steady.time);
  CHECK(why.compute_busy == SimTime(20));
  REQUIRE(why.idle.size() == 1);
  CHECK(why.idle[0].use == TimeUse::kHostIssue);
  CHECK(why.idle[0].time == SimTime(180));
}

// Two kernels of 100, each issued in 10. Before the second one the host frees memory: it waits for
// the first kernel, takes 7, and issues. The first one of the next step is issued meanwhile.
TEST_CASE("A stall that drains the device costs its own time, not what the device does meanwhile") {
  const TwoKernels p(SimTime(100), SimTime(10));
  for (const bool drains : {false, true}) {
    CAPTURE(drains);
    HostStalls stalls;
    stalls.later_steps = stalls.first_step = {{p.second, SimTime(7), drains}};
    EngineOptions options;
    options.stalls = &stalls;
    EngineWorkspace workspace;
    const EngineResult result = RunEngine(p.program, p.prices, options, workspace);
    REQUIRE(result.is_steady);
    CHECK(result.steady.time == SimTime(drains ? 217 : 200));
    CHECK(result.steady.compute_idle[static_cast<std::size_t>(Stream::kHost)] ==
          SimTime(drains ? 17 : 0));
  }
}

// Compute 0-300 and 600-700, a copy kernel on the gather's stream 250-350, gathers 100-400 and
// 350-500 at once, a copy to the host 480-650; nothing from 700 on but the reduction 800-900.
TEST_CASE("The device's time by what runs at a moment") {
  struct Row {
    OpCode code;
    Stream stream;
    std::int64_t start, end;
  };
  const std::vector<Row> rows = {
      {OpCode::kCompute, Stream::kCompute, 0, 300},
      {OpCode::kAllGather, Stream::kGather, 100, 400},
      {OpCode::kGatherCopyIn, Stream::kGather, 250, 350},
      {OpCode::kAllGather, Stream::kReplicate, 350, 500},
      {OpCode::kCopyD2h, Stream::kD2h, 480, 650},
      {OpCode::kCompute, Stream::kCompute, 600, 700},
      {OpCode::kStreamWait, Stream::kReduce, 750, 750},
      {OpCode::kHostWait, Stream::kHost, 0, 2000},
      {OpCode::kReduceScatter, Stream::kReduce, 800, 900},
  };
  Program program;
  program.groups = {{"shard", 8, 1}};
  ShapeInterner interner(program);
  std::vector<Span> spans(1);  // of a step before, which does not count
  spans[0].end = SimTime(5000);
  BodyBuilder step(program, program.step);
  for (const Row& row : rows) {
    OpShape shape;
    shape.code = row.code;
    shape.stream = row.stream;
    if (InfoOf(row.code).is_collective) {
      shape.group = GroupId(0);
    }
    Span span;
    span.op = step.Add({interner.Intern(shape)});
    span.stream = row.stream;
    span.start = SimTime(row.start);
    span.end = SimTime(row.end);
    spans.push_back(span);
  }
  step.Finish();
  const DeviceTime device = TimeOfDevice(program, spans);
  CHECK(device.total == SimTime(900));
  CHECK(device.computing == SimTime(450));      // 0-350, 600-700
  CHECK(device.uncovered == SimTime(350));      // 350-600, 800-900
  CHECK(device.idle == SimTime(100));           // 700-800
  CHECK(device.communicating == SimTime(500));  // 100-500, 800-900
  CHECK(device.overlapped == SimTime(250));     // 100-350
  CHECK(device.Overlap() == doctest::Approx(0.5));
}

}  // namespace
}  // namespace shardwright
