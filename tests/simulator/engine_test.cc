// Expected values: closed forms by hand, or the slow simulators of reference_engine.h and
// reference_ranks.h, which share no loop with the engine.

#include "simulator/engine.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "tests/simulator/random_program.h"
#include "tests/simulator/reference_engine.h"
#include "tests/simulator/reference_ranks.h"

namespace shardwright {
namespace {

EngineOptions Uncontended() {
  EngineOptions options;
  options.contention = false;
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

  // Ends of the first step's ops.
  std::vector<std::int64_t> Ends(std::int64_t wake_up = 0) {
    builder_.Finish();
    prices_.wake_up = SimTime(wake_up);
    EngineWorkspace workspace;
    std::vector<Span> spans;
    (void)RunEngineWithSpans(program_, prices_, Uncontended(), workspace, spans);
    std::vector<std::int64_t> ends;
    for (const Span& span : spans) {
      if (span.step == 0) {
        ends.push_back(span.end.value);
      }
    }
    return ends;
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

TEST_CASE("Random programs take the times of the reference simulator") {
  EngineWorkspace workspace;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {3, 2, 4, false});
    constexpr int kSteps = 9;
    const ReferenceResult reference = RunReference(random.program, random.prices, kSteps);
    std::vector<Span> spans;
    const EngineResult result =
        RunEngineWithSpans(random.program, random.prices, Uncontended(), workspace, spans);
    CheckSpans(reference, spans);
    CHECK(result.init.value == reference.fronts[0]);
    CHECK(result.first.time.value == reference.fronts[1] - reference.fronts[0]);
    if (result.is_steady) {
      CHECK(result.steady.time.value == reference.fronts[kSteps] - reference.fronts[kSteps - 1]);
    }
  }
}

TEST_CASE("Random programs with contention take the times of the slow simulation of ranks") {
  EngineWorkspace workspace;
  int steady = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    RandomProgram random = MakeRandomProgram(seed, {8, 4, 5, true, static_cast<int>(1 + seed % 4)});
    EngineOptions options;
    std::vector<Span> spans;
    const EngineResult result =
        RunEngineWithSpans(random.program, random.prices, options, workspace, spans);
    steady += result.is_steady ? 1 : 0;
    // One rank, alone in each of its groups.
    for (Group& group : random.program.groups) {
      group = {group.name, 1, 1};
    }
    const RankProgram rank{&random.program, &random.prices, 1};
    AllRanksOptions all;
    // The steps behind the last one slow its end down.
    all.steps = std::min(result.steps + 2, options.max_steps);
    const AllRanksResult expected = RunReferenceRanks({&rank, 1}, all);
    std::size_t next = 0;
    for (const Span& span : expected.spans) {
      if (span.step == 0 || span.step + 1 == static_cast<std::uint32_t>(result.steps)) {
        REQUIRE(next < spans.size());
        CHECK(span == spans[next++]);
      }
    }
    CHECK(next == spans.size());
    CHECK(result.first.time == expected.step_times[0]);
    if (result.is_steady) {
      CHECK(result.steady.time == expected.step_times[static_cast<std::size_t>(result.steps) - 1]);
    }
  }
  CHECK(steady >= 200);
}

}  // namespace
}  // namespace shardwright
