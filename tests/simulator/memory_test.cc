// Allocated memory against a recount that keeps a set of existing buffers, and peaks by hand.

#include "simulator/memory.h"

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"
#include "tests/simulator/random_program.h"

namespace shardwright {
namespace {

// The highest sum over existing buffers, recomputed from scratch after every point.
struct Recount {
  explicit Recount(const Program& p) : program(p) {}

  void Run(const Body& body) {
    for (std::uint32_t i = 0; i < body.size(); ++i) {
      Apply(body.PointsBefore(OpId(i)));
    }
    Apply(body.PointsAtEnd());
  }
  void Apply(std::span<const MemoryPoint> points) {
    for (const MemoryPoint& point : points) {
      if (point.kind == PointKind::kFree) {
        existing.erase(point.buffer.value);
      } else {
        existing.insert(point.buffer.value);
      }
      Note();
    }
  }
  void Note() {
    std::int64_t total = 0;
    for (const std::uint32_t b : existing) {
      total += program.buffers[b].size.value;
    }
    peak = std::max(peak, total);
  }

  const Program& program;
  std::set<std::uint32_t> existing;
  std::int64_t peak = 0;
};

TEST_CASE("Peaks of random programs are those of a recount") {
  MemoryWorkspace workspace;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    CAPTURE(seed);
    const RandomProgram random = MakeRandomProgram(seed, {12, 5, 5, false});
    const Program& program = random.program;
    const AllocatedMemory exact = MeasureAllocated(program, workspace);

    Recount recount(program);
    recount.Run(program.init);
    recount.Run(program.warmup.ops.empty() ? program.step : program.warmup);
    CHECK(exact.device_first.total.value == recount.peak);
    if (!program.warmup.ops.empty()) {
      recount.Run(program.step);
    }
    recount.peak = 0;
    recount.Note();
    recount.Run(program.step);
    CHECK(exact.device_steady.total.value == recount.peak);

    std::int64_t sum = 0;
    for (const Bytes bytes : exact.device_steady.by_category) {
      sum += bytes.value;
    }
    CHECK(sum == exact.device_steady.total.value);
    for (const bool is_first : {true, false}) {
      const MemoryPeak& peak = is_first ? exact.device_first : exact.device_steady;
      std::int64_t explained = 0;
      for (const PeakBuffer& buffer : ExplainPeak(program, peak, is_first)) {
        explained += buffer.size.value;
      }
      CHECK(explained == peak.total.value);
    }
  }
}

TEST_CASE("Lazily allocated states count from the first step on, host memory counts apart") {
  // By hand: the step holds 10 of activations; states of 100 come to stay at its end, behind the
  // free of the activations; 7 on the host throughout.
  Program program;
  ShapeInterner interner(program);
  const ShapeId shape = interner.Intern(OpShape{});
  BodyBuilder init(program, program.init);
  Buffer on_host{Bytes(7), Category::kParameterShard};
  on_host.on_host = true;
  (void)init.NewAllocated(on_host);
  init.Finish();
  BodyBuilder step(program, program.step);
  const BufferId activation = step.NewAllocated({Bytes(10), Category::kActivation});
  (void)step.Add({shape});
  step.Free(activation);
  const BufferId state = step.NewBuffer({Bytes(100), Category::kOptimizerState});
  step.Alloc(state, PointKind::kAllocOnce);
  (void)step.Add({shape});
  step.Finish();

  MemoryWorkspace workspace;
  const AllocatedMemory memory = MeasureAllocated(program, workspace);
  CHECK(memory.device_init.total == Bytes(0));
  CHECK(memory.host_init.total == Bytes(7));
  CHECK(memory.device_first.total == Bytes(100));
  CHECK(memory.device_first.before_op == OpId(1));
  CHECK(memory.device_steady.total == Bytes(110));
  CHECK(memory.device_steady.before_op == OpId(0));
  CHECK(memory.host_first.total == Bytes(7));
  CHECK(memory.host_steady.total == Bytes(7));
  CHECK(&memory.DevicePeak() == &memory.device_steady);
  const auto buffers = ExplainPeak(program, memory.device_steady, false);
  REQUIRE(buffers.size() == 2);
  CHECK(buffers[0].category == Category::kOptimizerState);
  CHECK(buffers[0].size == Bytes(100));
  CHECK(buffers[1].category == Category::kActivation);
}

}  // namespace
}  // namespace shardwright
