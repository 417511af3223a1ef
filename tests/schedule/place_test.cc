// Place against the brute-force order (brute_force.h): whoever shares bytes must be ordered.

#include "schedule/place.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "schedule/print.h"
#include "schedule/program.h"
#include "tests/schedule/brute_force.h"
#include "tests/schedule/check_placement.h"
#include "tests/schedule/random_program.h"

namespace shardwright {
namespace {

constexpr Bytes kBlock{256};  // the default alignment

// A step on two streams, with sizes that are multiples of the alignment.
struct Tiny {
  Program program;
  ShapeInterner interner{program};
  BodyBuilder init{program, program.init};
  BodyBuilder warmup{program, program.warmup};
  BodyBuilder step{program, program.step};

  OpId Add(BodyBuilder& body, Stream stream, BufferId written, std::vector<BufferId> read = {}) {
    OpShape shape;
    const auto on_host = [&](BufferId buffer) { return program.buffers[buffer.value].on_host; };
    shape.code = on_host(written)                                 ? OpCode::kCopyD2h
                 : std::any_of(read.begin(), read.end(), on_host) ? OpCode::kCopyH2d
                                                                  : OpCode::kCast;
    shape.stream = stream;
    const OpId op = body.Add({interner.Intern(shape), Phase::kForward, kNoSubject, 0, count_++});
    body.Use(written, AccessMode::kWrite, Role::kOutput);
    for (const BufferId buffer : read) {
      body.Use(buffer, AccessMode::kRead, Role::kInput);
    }
    return op;
  }
  BufferId NewAllocated(std::int64_t blocks, Stream owner = Stream::kCompute) {
    return step.NewAllocated({blocks * kBlock, Category::kTemporary, owner});
  }
  // Finishes and places; the program must be legal, and the placement safe.
  Placement Done() {
    init.Finish();
    warmup.Finish();
    step.Finish();
    CHECK(BruteForceBrokenRules(program).empty());
    return CheckPlacement(program);
  }

 private:
  std::uint8_t count_ = 0;
};

TEST_CASE("Place: work of one stream shares bytes") {
  Tiny t;
  // a lives alone, then b, then both c and d: 3, 5, 2 + 2 blocks. The largest decides.
  for (const std::int64_t blocks : {3, 5}) {
    const BufferId buffer = t.NewAllocated(blocks);
    t.Add(t.step, Stream::kCompute, buffer);
    t.step.Free(buffer);
  }
  const BufferId c = t.NewAllocated(2);
  t.Add(t.step, Stream::kCompute, c);
  const BufferId d = t.NewAllocated(2);
  t.Add(t.step, Stream::kCompute, d, {c});
  t.step.Free(c);
  t.step.Free(d);
  CHECK(t.Done().device_size == 5 * kBlock);
  CHECK(PeakAllocated(t.program) == 5 * kBlock);
  CHECK(PeakInUse(t.program) == 5 * kBlock);
}

TEST_CASE("Place: bytes count from the first use to the last, not from alloc to free") {
  Tiny t;
  const BufferId a = t.NewAllocated(4);
  const BufferId b = t.NewAllocated(4);
  t.Add(t.step, Stream::kCompute, a);
  t.Add(t.step, Stream::kCompute, b);
  t.step.Free(a);
  t.step.Free(b);
  CHECK(t.Done().device_size == 4 * kBlock);
  CHECK(PeakInUse(t.program) == 4 * kBlock);
  CHECK(PeakAllocated(t.program) == 8 * kBlock);
}

TEST_CASE("Place: two streams share bytes only behind an edge") {
  for (const bool with_edge : {false, true}) {
    CAPTURE(with_edge);
    Tiny t;
    const BufferId a = t.NewAllocated(4);
    const OpId first = t.Add(t.step, Stream::kCompute, a);
    t.step.AfterSlot(0);  // the second op of the step before
    t.step.Free(a);
    const BufferId b = t.NewAllocated(4, Stream::kReduce);
    const OpId second = t.Add(t.step, Stream::kReduce, b);
    if (with_edge) {
      t.step.After(first);
    }
    t.step.Free(b);
    t.step.SetCarry(0, second);
    CHECK(t.Done().device_size == (with_edge ? 4 : 8) * kBlock);
  }
}

TEST_CASE("Place: an order within the step is not enough, the next step must wait too") {
  Tiny t;
  const BufferId a = t.NewAllocated(4);
  const OpId first = t.Add(t.step, Stream::kCompute, a);
  t.step.Free(a);
  const BufferId b = t.NewAllocated(4, Stream::kReduce);
  t.Add(t.step, Stream::kReduce, b);
  t.step.After(first);
  t.step.Free(b);
  // The next step's write of a does not wait for b.
  CHECK(t.Done().device_size == 8 * kBlock);
}

TEST_CASE("Place: what one step hands to the next shares bytes with what lies between") {
  // carried is read at the beginning of a step and written at its end; between lies a larger
  // buffer.
  Tiny t;
  const BufferId carried = t.init.NewAllocated({Bytes(512)});
  t.Add(t.init, Stream::kCompute, carried);
  const BufferId early = t.NewAllocated(1);
  t.Add(t.step, Stream::kCompute, early, {carried});
  t.step.Free(carried);
  t.step.Free(early);
  const BufferId large = t.NewAllocated(3);
  t.Add(t.step, Stream::kCompute, large);
  t.step.Free(large);
  t.step.Alloc(carried);
  t.Add(t.step, Stream::kCompute, carried);
  CHECK(t.Done().device_size == 3 * kBlock);
  CHECK(PeakAllocated(t.program) == 3 * kBlock);
  // carried and early, then large, rounded up.
  CHECK(PeakAllocated(t.program, Bytes(1024)) == Bytes(2048));
}

TEST_CASE("Place: what the last step has left is free only for what comes after its last use") {
  // carried is read at the beginning of a step on compute and written at its end, after other's
  // use on reduce; so other may take its bytes exactly if it waits for the read.
  for (const bool with_edge : {false, true}) {
    CAPTURE(with_edge);
    Tiny t;
    const BufferId carried = t.init.NewAllocated({2 * kBlock});
    t.Add(t.init, Stream::kCompute, carried);
    const BufferId result = t.init.NewAllocated({kBlock});
    t.Add(t.init, Stream::kCompute, result);
    const OpId read = t.Add(t.step, Stream::kCompute, result, {carried});
    t.step.Free(carried);
    const BufferId other = t.NewAllocated(2, Stream::kReduce);
    const OpId use = t.Add(t.step, Stream::kReduce, other);
    if (with_edge) {
      t.step.After(read);
    }
    t.step.Free(other);
    t.step.Alloc(carried);
    t.Add(t.step, Stream::kCompute, carried);
    t.step.After(use);
    CHECK(t.Done().device_size == (with_edge ? 3 : 5) * kBlock);
  }
}

TEST_CASE("Place: what lived in init or warmup is free only for what comes after it") {
  for (const bool in_warmup : {false, true}) {
    for (const bool with_edge : {false, true}) {
      CAPTURE(in_warmup);
      CAPTURE(with_edge);
      Tiny t;
      BodyBuilder& before = in_warmup ? t.warmup : t.init;
      const BufferId early = before.NewAllocated({3 * kBlock});
      before.SetCarry(0, t.Add(before, Stream::kCompute, early));
      before.Free(early);
      const BufferId late = t.NewAllocated(2, Stream::kReduce);
      t.Add(t.step, Stream::kReduce, late);
      if (with_edge) {
        t.step.AfterSlot(0);
      }
      t.step.Free(late);
      CHECK(t.Done().device_size == (with_edge ? 3 : 5) * kBlock);
    }
  }
}

TEST_CASE("Place: a zero-filled buffer shares with nobody") {
  Tiny t;
  const BufferId zeros =
      t.step.NewAllocated({kBlock, Category::kTemporary, Stream::kCompute, false, true});
  t.Add(t.step, Stream::kCompute, zeros);
  t.step.Free(zeros);
  const BufferId plain = t.NewAllocated(1);
  t.Add(t.step, Stream::kCompute, plain);
  t.step.Free(plain);
  CHECK(t.Done().device_size == 2 * kBlock);
}

TEST_CASE("Place: persistent, allocated-once and host buffers") {
  Tiny t;
  const BufferId weight = t.init.NewAllocated({Bytes(300), Category::kParameterShard});
  t.Add(t.init, Stream::kCompute, weight);
  const BufferId state = t.step.NewBuffer({Bytes(256), Category::kOptimizerState});
  const BufferId host =
      t.step.NewAllocated({Bytes(100), Category::kActivation, Stream::kCompute, /*on_host=*/true});
  const BufferId a = t.NewAllocated(1);
  t.Add(t.step, Stream::kCompute, a, {weight});
  t.Add(t.step, Stream::kCompute, host, {a});
  t.step.Free(a);
  t.step.Alloc(state, PointKind::kAllocOnce);
  t.Add(t.step, Stream::kCompute, state, {host});
  t.step.Free(host);
  const Placement placement = t.Done();
  CHECK(placement.device_size == (2 + 1 + 1) * kBlock);  // weight rounded up, state, a
  CHECK(placement.host_size == Bytes(256));
}

TEST_CASE("Place: what the first step leaves behind for good takes bytes that warmup has used") {
  Tiny t;
  const BufferId bucket = t.warmup.NewAllocated({4 * kBlock});
  t.Add(t.warmup, Stream::kCompute, bucket);
  t.warmup.Free(bucket);
  const BufferId rebuilt = t.step.NewBuffer({3 * kBlock});
  t.step.Alloc(rebuilt, PointKind::kAllocOnce);
  t.Add(t.step, Stream::kCompute, rebuilt);
  const BufferId other = t.NewAllocated(1);
  t.Add(t.step, Stream::kCompute, other, {rebuilt});
  t.step.Free(other);
  CHECK(t.Done().device_size == 4 * kBlock);
}

TEST_CASE("Place: alignment") {
  Program program = RandomProgram(7);
  for (const std::int64_t alignment : {1, 512, 4096}) {
    const Placement placement = Place(program, {Bytes(alignment)});
    for (const Bytes offset : placement.offsets) {
      CHECK(offset.value % alignment == 0);
    }
  }
}

TEST_CASE("Place: whoever shares bytes is ordered, in random programs") {
  double worst = 0.0;
  double sum = 0.0;
  const int count = 200;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    CAPTURE(seed);
    RandomProgramOptions options;
    options.max_units = 6;
    const Program program = RandomProgram(seed, options);
    const Placement placement = CheckPlacement(program, Bytes(16));
    CHECK(placement == Place(program, {Bytes(16)}));
    const double ratio = Ratio(placement.device_size, PeakAllocated(program));
    worst = std::max(worst, ratio);
    sum += ratio;
  }
  MESSAGE("arena over allocated peak: mean ", sum / count, ", worst ", worst);
}

}  // namespace
}  // namespace shardwright
