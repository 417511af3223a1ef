// Expected values: closed forms by hand, or the reference simulator of reference_engine.h, which
// shares no code with the engines.

#include "simulator/engine.h"

#include <cstdint>
#include <initializer_list>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "tests/simulator/random_program.h"
#include "tests/simulator/reference_engine.h"

namespace shardwright {
namespace {

EngineOptions Linear(bool periodic) {
  EngineOptions options;
  options.contention = false;
  options.periodic = periodic;
  return options;
}

EngineOptions Events() {
  EngineOptions options;
  options.contention = false;
  options.force_events = true;
  return options;
}

// Spans of init and the first step, and of later steps as far as `spans` has them, are the
// reference's.
void CheckSpans(const ReferenceResult& reference, const std::vector<Span>& spans) {
  for (const Span& span : spans) {
    const std::size_t body = span.body == BodyKind::kInit ? 0 : span.step + 1;
    const ReferenceTime& expected = reference.bodies.at(body).at(span.op.value);
    CHECK(span.issued.value == expected.issued);
    CHECK(span.start.value == expected.start);
    CHECK(span.end.value == expected.end);
  }
}

// A program of one step, built op by op, with a price per op.
class SmallProgram {
 public:
  SmallProgram() : interner_(program_), builder_(program_, program_.step) {
    BodyBuilder init(program_, program_.init);
    init.Finish();
    program_.groups = {{"shard", 8, 1}, {"shard.reduce", 8, 1}};
  }

  struct OpPrice {
    std::int64_t duration = 0;
    std::int64_t issue = 0;
    std::int64_t launches = 1;
  };
  OpId Add(OpCode code, Stream stream, const OpPrice& price, std::initializer_list<OpId> after = {},
           std::uint32_t group = 0) {
    OpShape shape;
    shape.code = code;
    shape.stream = stream;
    shape.bytes = Bytes(static_cast<std::int64_t>(prices_.prices.size()));  // keeps shapes apart
    if (InfoOf(code).is_collective) {
      shape.group = GroupId(group);
    }
    const OpId op = builder_.Add({interner_.Intern(shape)});
    for (const OpId other : after) {
      builder_.After(other);
    }
    Price p;
    p.duration = SimTime(price.duration);
    p.issue = SimTime(price.issue);
    p.first_launch = SimTime(price.issue / price.launches);
    p.tail = SimTime(price.duration / price.launches);
    prices_.prices.push_back(p);
    return op;
  }

  // Ends of the first step's ops by both engines, which must agree.
  std::vector<std::int64_t> Ends(std::int64_t wake_up = 0) {
    builder_.Finish();
    prices_.wake_up = SimTime(wake_up);
    EngineWorkspace workspace;
    std::vector<std::int64_t> ends[2];
    for (const bool events : {false, true}) {
      std::vector<Span> spans;
      (void)RunEngineWithSpans(program_, prices_, events ? Events() : Linear(false), workspace,
                               spans);
      for (const Span& span : spans) {
        if (span.step == 0) {
          ends[events ? 1 : 0].push_back(span.end.value);
        }
      }
    }
    CHECK(ends[0] == ends[1]);
    return ends[0];
  }

 private:
  Program program_;
  PriceTable prices_;
  ShapeInterner interner_;
  BodyBuilder builder_;
};

TEST_CASE("By hand: two streams, an edge, and a host that issues") {
  SmallProgram p;
  // Issued at 10, 20, 30. The copy runs 10..60 beside the compute 20..120; the last op waits for
  // the copy only through its stream: 120..150.
  const OpId copy = p.Add(OpCode::kCast, Stream::kCopyIn, {50, 10});
  (void)p.Add(OpCode::kCompute, Stream::kCompute, {100, 10});
  (void)p.Add(OpCode::kCompute, Stream::kCompute, {30, 10}, {copy});
  CHECK(p.Ends() == std::vector<std::int64_t>{60, 120, 150});
}

TEST_CASE("By hand: an op of many small kernels is bound by its launches") {
  SmallProgram p;
  // Ten launches of 5 are done at 50; the last kernel takes 2 more. The next op is issued at 55.
  (void)p.Add(OpCode::kCompute, Stream::kCompute, {20, 50, 10});
  (void)p.Add(OpCode::kCompute, Stream::kCompute, {1, 5});
  CHECK(p.Ends() == std::vector<std::int64_t>{52, 56});
}

TEST_CASE("By hand: collectives of one communicator run in issue order, those of two do not wait") {
  SmallProgram same;
  // The gather waits for the compute until 100, and the reduction behind it, though its own stream
  // is free: 100..150, 150..180.
  const OpId work = same.Add(OpCode::kCompute, Stream::kCompute, {100});
  (void)same.Add(OpCode::kAllGather, Stream::kGather, {50}, {work});
  (void)same.Add(OpCode::kReduceScatter, Stream::kReduce, {30});
  CHECK(same.Ends() == std::vector<std::int64_t>{100, 150, 180});
  SmallProgram own;
  const OpId other = own.Add(OpCode::kCompute, Stream::kCompute, {100});
  (void)own.Add(OpCode::kAllGather, Stream::kGather, {50}, {other});
  (void)own.Add(OpCode::kReduceScatter, Stream::kReduce, {30}, {}, 1);
  CHECK(own.Ends() == std::vector<std::int64_t>{100, 150, 30});
}

TEST_CASE("By hand: a host wait holds back what is issued after it, and only if it has to wait") {
  SmallProgram p;
  // Compute issued at 10 ends at 110; the host waits, wakes up at 117 and issues until 127.
  const OpId work = p.Add(OpCode::kCompute, Stream::kCompute, {100, 10});
  (void)p.Add(OpCode::kHostWait, Stream::kHost, {}, {work});
  (void)p.Add(OpCode::kAllGather, Stream::kGather, {40, 10});
  // Nothing to wait for any more: no wake-up. Issued at 137.
  (void)p.Add(OpCode::kHostWait, Stream::kHost, {}, {work});
  (void)p.Add(OpCode::kCompute, Stream::kCompute, {5, 10});
  CHECK(p.Ends(7) == std::vector<std::int64_t>{110, 117, 167, 127, 142});
}

TEST_CASE("Both engines give the times of the reference simulator on random programs") {
  EngineWorkspace workspace;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {3, 2, 4, false});
    constexpr int kSteps = 9;
    const ReferenceResult reference = RunReference(random.program, random.prices, kSteps);

    std::vector<Span> spans;
    const EngineResult events =
        RunEngineWithSpans(random.program, random.prices, Events(), workspace, spans);
    CheckSpans(reference, spans);
    CHECK(events.init.value == reference.fronts[0]);
    CHECK(events.first.time.value == reference.fronts[1] - reference.fronts[0]);
    if (events.is_steady) {
      CHECK(events.steady.time.value == reference.fronts[kSteps] - reference.fronts[kSteps - 1]);
    }

    spans.clear();
    const EngineResult linear =
        RunEngineWithSpans(random.program, random.prices, Linear(false), workspace, spans);
    if (linear.steps == 2) {  // later steps may lie behind a jump in time
      CheckSpans(reference, spans);
    }
    CHECK(linear.init == events.init);
    CHECK(linear.first == events.first);
    if (linear.is_steady && events.is_steady) {
      CHECK(linear.steady.time == events.steady.time);
    }
  }
}

// Half of the programs have one kind of layer, the others up to four.
int KindsOf(std::uint64_t seed) {
  return seed % 2 == 0 ? 1 : static_cast<int>(2 + seed / 2 % 3);
}

TEST_CASE("Skipping repeats changes no time") {
  EngineWorkspace workspace;
  int steady = 0;
  std::int64_t exact_ops = 0;
  std::int64_t periodic_ops = 0;
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {40, 12, 6, false, KindsOf(seed)});
    EngineOptions options = Linear(false);
    EngineResult exact = RunEngine(random.program, random.prices, options, workspace);
    const EngineResult periodic = RunEngine(random.program, random.prices, Linear(true), workspace);
    if (periodic.is_steady && !exact.is_steady) {
      // It saw the steady state before the end of the last step.
      options.max_steps += 2;
      exact = RunEngine(random.program, random.prices, options, workspace);
    }
    CHECK(periodic.init == exact.init);
    CHECK(periodic.first == exact.first);
    CHECK(periodic.is_steady == exact.is_steady);
    CHECK(periodic.steady == exact.steady);
    steady += exact.is_steady ? 1 : 0;
    exact_ops += exact.simulated_ops;
    periodic_ops += periodic.simulated_ops;
  }
  CHECK(steady >= 950);
  CHECK(periodic_ops * 3 < exact_ops);  // otherwise this test would show little
}

TEST_CASE("Skipping repeats in the event loop changes no time, with and without contention") {
  EngineWorkspace workspace;
  std::int64_t exact_ops = 0;
  std::int64_t periodic_ops = 0;
  for (std::uint64_t seed = 1; seed <= 1000; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {40, 12, 6, seed % 4 != 0, KindsOf(seed)});
    EngineOptions options;
    options.contention = seed % 4 != 0;
    options.force_events = true;
    EngineResult periodic = RunEngine(random.program, random.prices, options, workspace);
    options.periodic = false;
    EngineResult exact = RunEngine(random.program, random.prices, options, workspace);
    if (periodic.is_steady && !exact.is_steady) {
      // It saw the steady state before the end of the last step; exact mode needs one step more,
      // and one after it.
      options.max_steps += 2;
      exact = RunEngine(random.program, random.prices, options, workspace);
    }
    exact_ops += exact.simulated_ops;
    periodic_ops += periodic.simulated_ops;
    periodic.simulated_ops = exact.simulated_ops;
    periodic.steps = exact.steps;
    CHECK(periodic == exact);
  }
  // Half of the programs have host waits or are bound by the host, and skip nothing.
  CHECK(periodic_ops * 4 < exact_ops * 3);
}

TEST_CASE("Copies are skipped together only where each of them ends as it began") {
  // Another op is next on a stream behind the first of what looks like two copies; or the ops
  // behind a copy are cut into other segments than where they were met before.
  for (const RandomProgram& random : {MakeRandomProgram(801887, {6, 24, 5, true}),
                                      MakeRandomProgram(1765, {40, 12, 6, true, 2})}) {
    EngineWorkspace workspace;
    EngineOptions options;
    const EngineResult periodic = RunEngine(random.program, random.prices, options, workspace);
    options.periodic = false;
    options.max_steps += 2;  // exact mode may see the steady state later
    const EngineResult exact = RunEngine(random.program, random.prices, options, workspace);
    CHECK(periodic.first == exact.first);
    CHECK(periodic.steady == exact.steady);
  }
}

TEST_CASE("Skipping repeats of up to 64 micro-batches changes no time") {
  EngineWorkspace workspace;
  std::int64_t exact_ops = 0;
  std::int64_t periodic_ops = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    const bool contention = seed % 3 != 0;
    const RandomProgram random = MakeRandomProgram(seed, {6, 64, 5, contention, KindsOf(seed)});
    EngineOptions options;
    options.contention = contention;
    EngineResult periodic = RunEngine(random.program, random.prices, options, workspace);
    options.periodic = false;
    EngineResult exact = RunEngine(random.program, random.prices, options, workspace);
    if (periodic.is_steady && !exact.is_steady) {
      options.max_steps += 2;  // as above
      exact = RunEngine(random.program, random.prices, options, workspace);
    }
    exact_ops += exact.simulated_ops;
    periodic_ops += periodic.simulated_ops;
    periodic.simulated_ops = exact.simulated_ops;
    periodic.steps = exact.steps;
    CHECK(periodic == exact);
  }
  CHECK(periodic_ops * 4 < exact_ops * 3);
}

}  // namespace
}  // namespace shardwright
