#include "core/units.h"

#include <cstdint>
#include <type_traits>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

// What must not compile: mixing units and bare numbers.
template <class A, class B>
concept Addable = requires(A a, B b) {
  a + b;
};
static_assert(Addable<Bytes, Bytes>);
static_assert(!Addable<Bytes, Seconds>);
static_assert(!Addable<Bytes, int>);
static_assert(!std::is_convertible_v<std::int64_t, Bytes>);
static_assert(!std::is_convertible_v<Bytes, std::int64_t>);
static_assert(!std::is_convertible_v<OpId, BufferId>);

TEST_CASE("Units: arithmetic") {
  CHECK(Bytes(3) + Bytes(4) == Bytes(7));
  CHECK(Bytes(3) * 4 == Bytes(12));
  CHECK(Bytes(50'000'000'000) / BytesPerSecond(25e9) == Seconds(2));
  CHECK(Flops(4e12) / FlopsPerSecond(2e12) == Seconds(2));
  CHECK(Ratio(Bytes(1), Bytes(4)) == 0.25);
}

TEST_CASE("Units: durations are rounded to the nearest picosecond, halves away from zero") {
  CHECK(ToSimTime(Seconds(1e-12)) == SimTime(1));
  CHECK(ToSimTime(Seconds(1.4e-12)) == SimTime(1));
  CHECK(ToSimTime(Seconds(2.5e-12)) == SimTime(3));
  CHECK(ToSimTime(Seconds(-2.5e-12)) == SimTime(-3));
  CHECK(ToSeconds(SimTime(5'000'000)) == Seconds(5e-6));
}

TEST_CASE("Units: ceiling division and rounding up") {
  CHECK(CeilDiv(0, 4) == 0);
  CHECK(CeilDiv(1, 4) == 1);
  CHECK(CeilDiv(4, 4) == 1);
  CHECK(CeilDiv(5, 4) == 2);
  CHECK(RoundUp(513, 512) == 1024);
  CHECK(RoundUp(512, 512) == 512);
}

TEST_CASE("Units: ids") {
  CHECK_FALSE(OpId().valid());
  CHECK(OpId(std::size_t{7}).value == 7);
  CHECK(OpId(3) < OpId(4));
}

TEST_CASE("Units: element sizes") {
  CHECK(SizeOf(DType::kFp64) == 8);
  CHECK(SizeOf(DType::kFp32) == 4);
  CHECK(SizeOf(DType::kBf16) == 2);
  CHECK(SizeOf(DType::kFp8) == 1);
  CHECK(SizeOf(DType::kInt64) == 8);
  CHECK(SizeOf(DType::kBool) == 1);
}

}  // namespace
}  // namespace shardwright
