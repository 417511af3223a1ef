#include "schedule/builder.h"

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "schedule/program.h"

namespace shardwright {
namespace {

OpShape ShapeOf(OpCode code, Stream stream, Bytes bytes = Bytes(0)) {
  OpShape shape;
  shape.code = code;
  shape.stream = stream;
  shape.bytes = bytes;
  return shape;
}

TEST_CASE("ShapeInterner: equal shapes with equal kernels get one id") {
  Program program;
  ShapeInterner interner(program);
  Kernel small;
  small.read = Bytes(1);
  Kernel large;
  large.read = Bytes(2);
  const OpShape shape = ShapeOf(OpCode::kCompute, Stream::kCompute);
  const ShapeId a = interner.Intern(shape, std::vector<Kernel>{small});
  const ShapeId b = interner.Intern(shape, std::vector<Kernel>{small, large});
  const ShapeId c = interner.Intern(shape);
  CHECK(a != b);
  CHECK(b != c);
  CHECK(interner.Intern(shape, std::vector<Kernel>{small}) == a);
  CHECK(interner.Intern(shape, std::vector<Kernel>{small, large}) == b);
  CHECK(interner.Intern(shape) == c);
  OpShape other = shape;
  other.bytes = Bytes(4);
  CHECK(interner.Intern(other) != c);
  CHECK(program.shapes.size() == 4);
  CHECK(program.KernelsOf(program.shapes[b.value]).size() == 2);
  CHECK(program.KernelsOf(program.shapes[b.value])[1] == large);
}

TEST_CASE("BodyBuilder: points stand before the op that is added next, or at the end") {
  Program program;
  ShapeInterner interner(program);
  BodyBuilder builder(program, program.step);
  const ShapeId shape = interner.Intern(ShapeOf(OpCode::kCompute, Stream::kCompute));
  const BufferId a = builder.NewAllocated({Bytes(8)});
  const OpId first = builder.Add({shape});
  builder.Use(a, AccessMode::kWrite, Role::kOutput);
  const BufferId b = builder.NewAllocated({Bytes(16)});
  const OpId second = builder.Add({shape});
  builder.Use(a, AccessMode::kRead, Role::kInput, 3);
  builder.UseFirst(b, Bytes(5), AccessMode::kWrite, Role::kOutput);
  builder.Free(a);
  builder.Free(b, 4);
  builder.Finish();
  const Body& body = program.step;
  REQUIRE(body.PointsBefore(first).size() == 1);
  CHECK(body.PointsBefore(first)[0].buffer == a);
  REQUIRE(body.PointsBefore(second).size() == 1);
  CHECK(body.PointsBefore(second)[0].buffer == b);
  REQUIRE(body.PointsAtEnd().size() == 2);
  CHECK(body.PointsAtEnd()[0].kind == PointKind::kFree);
  CHECK(body.PointsAtEnd()[1].recorded_streams == 4);
  // An access spans the whole buffer unless it says less.
  CHECK(body.AccessesOf(first)[0] == Access{a, AccessMode::kWrite, Role::kOutput, 0, Bytes(8)});
  CHECK(body.AccessesOf(second)[0] == Access{a, AccessMode::kRead, Role::kInput, 3, Bytes(8)});
  CHECK(body.AccessesOf(second)[1] == Access{b, AccessMode::kWrite, Role::kOutput, 0, Bytes(5)});
}

TEST_CASE("BodyBuilder: edges that a queue implies are left out, but not those of a host wait") {
  Program program;
  ShapeInterner interner(program);
  BodyBuilder builder(program, program.step);
  const ShapeId compute = interner.Intern(ShapeOf(OpCode::kCompute, Stream::kCompute));
  const ShapeId reduce = interner.Intern(ShapeOf(OpCode::kCast, Stream::kReduce));
  const ShapeId wait = interner.Intern(ShapeOf(OpCode::kHostWait, Stream::kHost));
  const OpId a = builder.Add({compute});
  const OpId b = builder.Add({compute});
  builder.After(a);
  builder.After(OpId());
  const OpId c = builder.Add({reduce});
  builder.After(b);
  builder.After(b);
  builder.AfterSlot(2);
  const OpId d = builder.Add({wait});
  builder.After(c);
  const OpId e = builder.Add({wait});
  builder.After(d);
  builder.SetCarry(1, c);
  builder.Finish();
  const Body& body = program.step;
  CHECK(body.EdgesOf(a).empty());
  CHECK(body.EdgesOf(b).empty());
  REQUIRE(body.EdgesOf(c).size() == 2);
  CHECK(body.EdgesOf(c)[0] == Edge::FromOp(b));
  CHECK(body.EdgesOf(c)[1] == Edge::FromSlot(2));
  CHECK(body.EdgesOf(d).size() == 1);
  CHECK(body.EdgesOf(e).size() == 1);
  CHECK(program.carry_slot_count == 3);
  CHECK(body.carries == std::vector<OpId>{OpId(), c});
}

TEST_CASE("KeyCounter: how often each of many keys was met before") {
  std::mt19937_64 random(7);
  KeyCounter counter;
  for (int round = 0; round < 2; ++round) {  // the second one knows nothing of the first
    std::map<std::uint64_t, std::uint32_t> met;
    for (int i = 0; i < 20'000; ++i) {
      const std::uint64_t key = (random() % 5'000) << 40;  // 0 and keys that differ above only
      REQUIRE(counter.Next(key) == met[key]++);
    }
    counter.Clear();
  }
}

}  // namespace
}  // namespace shardwright
