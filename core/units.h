#pragma once

// Units and ids as types: a quantity converts to a number only through `.value`, and two
// quantities mix only through the operators below. 1 GB = 1e9 B, 1 GiB = 2^30 B; rates are bytes
// per second.

#include <cmath>
#include <compare>
#include <cstdint>
#include <functional>

namespace shardwright {

// A number with a unit. `Tag` names the unit, `Rep` is how it is stored.
template <class Tag, class Rep>
struct Quantity {
  Rep value{};

  constexpr Quantity() = default;
  constexpr explicit Quantity(Rep v) : value(v) {}

  constexpr auto operator<=>(const Quantity&) const = default;

  constexpr Quantity& operator+=(Quantity o) {
    value += o.value;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity o) {
    value -= o.value;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) {
    return Quantity(a.value + b.value);
  }
  friend constexpr Quantity operator-(Quantity a, Quantity b) {
    return Quantity(a.value - b.value);
  }
  friend constexpr Quantity operator*(Quantity a, Rep k) { return Quantity(a.value * k); }
  friend constexpr Quantity operator*(Rep k, Quantity a) { return Quantity(a.value * k); }
  friend constexpr Quantity operator/(Quantity a, Rep k) { return Quantity(a.value / k); }
};

// Memory and message sizes. Integer: sizes are never rounded silently.
using Bytes = Quantity<struct BytesTag, std::int64_t>;
// Floating-point operations; a multiply-add counts as two.
using Flops = Quantity<struct FlopsTag, double>;
using Seconds = Quantity<struct SecondsTag, double>;
using BytesPerSecond = Quantity<struct BytesPerSecondTag, double>;
using FlopsPerSecond = Quantity<struct FlopsPerSecondTag, double>;
// Simulated time in picoseconds: ties are exact, the range is +-106 days.
using SimTime = Quantity<struct SimTimeTag, std::int64_t>;

// Ratio of two quantities of one unit.
template <class Tag, class Rep>
[[nodiscard]] constexpr double Ratio(Quantity<Tag, Rep> a, Quantity<Tag, Rep> b) {
  return static_cast<double>(a.value) / static_cast<double>(b.value);
}

[[nodiscard]] constexpr Seconds operator/(Bytes b, BytesPerSecond r) {
  return Seconds(static_cast<double>(b.value) / r.value);
}
[[nodiscard]] constexpr Seconds operator/(Flops f, FlopsPerSecond r) {
  return Seconds(f.value / r.value);
}

inline constexpr double kPicosecondsPerSecond = 1e12;

// The one place where a duration is rounded: to the nearest picosecond, halves away from zero.
// Requires |s| < 9.2e6 s.
[[nodiscard]] inline SimTime ToSimTime(Seconds s) {
  return SimTime(std::llround(s.value * kPicosecondsPerSecond));
}
[[nodiscard]] constexpr Seconds ToSeconds(SimTime t) {
  return Seconds(static_cast<double>(t.value) / kPicosecondsPerSecond);
}

inline constexpr Bytes kKiB{std::int64_t{1} << 10};
inline constexpr Bytes kMiB{std::int64_t{1} << 20};
inline constexpr Bytes kGiB{std::int64_t{1} << 30};

// Ceil(a / b) for non-negative a and positive b.
[[nodiscard]] constexpr std::int64_t CeilDiv(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}
// The smallest multiple of `multiple` that is at least a.
[[nodiscard]] constexpr std::int64_t RoundUp(std::int64_t a, std::int64_t multiple) {
  return CeilDiv(a, multiple) * multiple;
}

// An index into one table; ids of different tables do not mix. Default-constructed: no id.
template <class Tag>
struct Id {
  static constexpr std::uint32_t kNoneValue = 0xffffffffu;
  std::uint32_t value = kNoneValue;

  constexpr Id() = default;
  constexpr explicit Id(std::uint32_t v) : value(v) {}
  constexpr explicit Id(std::size_t v) : value(static_cast<std::uint32_t>(v)) {}
  constexpr explicit Id(int v) : value(static_cast<std::uint32_t>(v)) {}

  constexpr auto operator<=>(const Id&) const = default;
  [[nodiscard]] constexpr bool valid() const { return value != kNoneValue; }
};

using OpId = Id<struct OpTag>;            // an op of one program body
using ShapeId = Id<struct ShapeTag>;      // an op shape (what a price depends on)
using BufferId = Id<struct BufferTag>;    // a logical buffer of a program
using GroupId = Id<struct GroupTag>;      // a communicator
using UnitId = Id<struct UnitTag>;        // an FSDP unit of a plan
using ModuleId = Id<struct ModuleTag>;    // a module of a model
using ParamId = Id<struct ParamTag>;      // a parameter of a model
using TensorId = Id<struct TensorTag>;    // an activation tensor of a model
using ModelOpId = Id<struct ModelOpTag>;  // an op of a model
using Rank = Id<struct RankTag>;          // a process of the job, 0..world-1

// Element types that buffers and kernels can have.
enum class DType : std::uint8_t { kFp32, kBf16, kFp16, kFp8, kFp64, kInt64, kInt32, kUint8, kBool };

// Bytes of one element.
[[nodiscard]] constexpr std::int64_t SizeOf(DType t) {
  switch (t) {
    case DType::kFp64:
    case DType::kInt64:
      return 8;
    case DType::kFp32:
    case DType::kInt32:
      return 4;
    case DType::kBf16:
    case DType::kFp16:
      return 2;
    case DType::kFp8:
    case DType::kUint8:
    case DType::kBool:
      return 1;
  }
  return 0;
}

}  // namespace shardwright

template <class Tag>
struct std::hash<shardwright::Id<Tag>> {
  std::size_t operator()(shardwright::Id<Tag> id) const noexcept {
    return std::hash<std::uint32_t>()(id.value);
  }
};
