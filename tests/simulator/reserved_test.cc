// What a program makes PyTorch's caching allocator reserve, worked out by hand from the allocator's
// rules (simulator/caching_allocator.h).

#include "simulator/reserved.h"

#include <vector>

#include <doctest/doctest.h>

#include "schedule/builder.h"

namespace shardwright {
namespace {

constexpr Bytes operator""_mib(unsigned long long n) {
  return Bytes(static_cast<std::int64_t>(n) * kMiB.value);
}

// Two steps of one op, back to back.
ReservedMemory ReplayTwice(const Program& program) {
  std::vector<Span> spans(2);
  for (std::uint32_t s = 0; s < 2; ++s) {
    spans[s].step = s;
    spans[s].op = OpId(0);
    spans[s].stream = Stream::kCompute;
  }
  AllocatorOptions options;
  options.capacity = kGiB;
  HostStalls stalls;
  return ReplayAllocator(program, spans, SimTime(1), options, DriverCosts{}, stalls);
}

// A step that allocates a buffer, runs one op and frees it.
ReservedMemory ReplayOneBuffer(Bytes size, const std::vector<Bytes>& pieces) {
  Program program;
  ShapeInterner shapes(program);
  PieceInterner interner(program);
  const ShapeId shape = shapes.Intern(OpShape{});
  BodyBuilder step(program, program.step);
  const BufferId buffer = step.NewAllocated({.size = size, .pieces = interner.Intern(pieces)});
  (void)step.Add({shape});
  step.Free(buffer);
  step.Finish();
  return ReplayTwice(program);
}

TEST_CASE("Pieces are requests of their own") {
  // One request of 12 MiB takes a segment of its size; two of 6 MiB share one of 20 MiB.
  CHECK(ReplayOneBuffer(12_mib, {}).peak_steady == 12_mib);
  CHECK(ReplayOneBuffer(12_mib, {6_mib, 6_mib}).peak_steady == 20_mib);
  // Twelve of 1 MiB come from segments of 2 MiB of the small pool.
  CHECK(ReplayOneBuffer(12_mib, std::vector<Bytes>(12, 1_mib)).peak_steady == 12_mib);
  // 3 x 8 MiB: two fit into 20 MiB, the third needs another.
  CHECK(ReplayOneBuffer(24_mib, std::vector<Bytes>(3, 8_mib)).peak_steady == 40_mib);
  // They are freed together, so the second step finds them.
  CHECK(ReplayOneBuffer(24_mib, std::vector<Bytes>(3, 8_mib)).peak_first == 40_mib);
}

TEST_CASE("Slices of a flat tensor are one request") {
  for (const std::uint32_t flat : {0, 1}) {
    Program program;
    ShapeInterner shapes(program);
    const ShapeId shape = shapes.Intern(OpShape{});
    BodyBuilder step(program, program.step);
    const BufferId a = step.NewAllocated({.size = 6_mib, .flat = flat});
    const BufferId between = step.NewAllocated({.size = 8_mib});
    const BufferId b = step.NewAllocated({.size = 6_mib, .flat = flat});
    (void)step.Add({shape});
    for (const BufferId buffer : {a, between, b}) {
      step.Free(buffer);
    }
    step.Finish();
    // Three requests share a segment of 20 MiB; the one of 12 MiB has a segment of its own.
    const ReservedMemory memory = ReplayTwice(program);
    CHECK(memory.peak_first == (flat == 0 ? 20_mib : 32_mib));
    CHECK(memory.peak_steady == memory.peak_first);
  }
}

TEST_CASE("Scratch that takes turns with what is allocated behind it is gone by then") {
  Program program;
  ShapeInterner shapes(program);
  PieceInterner interner(program);
  const ShapeId shape = shapes.Intern(OpShape{});
  BodyBuilder step(program, program.step);
  const BufferId scratch =
      step.NewAllocated({.size = 10_mib, .pieces = interner.Intern({{12_mib, 12_mib}})});
  const BufferId result = step.NewAllocated({.size = 12_mib});
  (void)step.Add({shape});
  step.Free(scratch);
  step.Free(result);
  step.Finish();
  // 10 and 12 MiB by sum; 2 x 12 MiB by requests, one of which the result gets.
  CHECK(ReplayTwice(program).peak_steady == 24_mib);
}

}  // namespace
}  // namespace shardwright
