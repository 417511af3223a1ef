#include "executor/half.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <doctest/doctest.h>

namespace shardwright {
namespace {

// The value of a 16-bit float by the definition of its format, in fp64.
double ValueOf(std::uint16_t bits, int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> fraction_bits) & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == (1 << exponent_bits) - 1) {
    return fraction == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) {
    return sign * std::ldexp(fraction, 1 - bias - fraction_bits);
  }
  return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
}

TEST_CASE("every 16-bit float has the value that its format defines, and survives the way back") {
  int wrong = 0;
  for (std::uint32_t i = 0; i < 65536; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    const double fp16 = ValueOf(bits, 5, 10);
    const double bf16 = ValueOf(bits, 8, 7);
    if (std::isnan(fp16)) {
      wrong +=
          std::isnan(Fp16ToFloat(bits)) && std::isnan(Fp16ToFloat(FloatToFp16(Fp16ToFloat(bits))))
              ? 0
              : 1;
    } else {
      wrong += Fp16ToFloat(bits) == fp16 && FloatToFp16(Fp16ToFloat(bits)) == bits ? 0 : 1;
    }
    if (std::isnan(bf16)) {
      wrong +=
          std::isnan(Bf16ToFloat(bits)) && std::isnan(Bf16ToFloat(FloatToBf16(Bf16ToFloat(bits))))
              ? 0
              : 1;
    } else {
      wrong += Bf16ToFloat(bits) == bf16 && FloatToBf16(Bf16ToFloat(bits)) == bits ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}

// Rounding is right when no neighbour is nearer and a tie went to the even one. The neighbours of a
// finite 16-bit float of one sign are the next smaller and larger bit patterns.
bool IsNearest(float value, std::uint16_t rounded, int exponent_bits, int fraction_bits) {
  // Infinity stands for the first number that the exponent cannot express.
  const auto magnitude = [&](int bits) {
    const int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
    return bits >= infinity
               ? std::ldexp(1.0, 1 << (exponent_bits - 1))
               : std::abs(ValueOf(static_cast<std::uint16_t>(bits), exponent_bits, fraction_bits));
  };
  const int own = rounded & 0x7fff;
  const double x = std::abs(static_cast<double>(value));
  const double error = std::abs(magnitude(own) - x);
  const auto fits = [&](int neighbour) {
    const double other = std::abs(magnitude(neighbour) - x);
    return error < other || (error == other && own % 2 == 0);
  };
  const int infinity = ((1 << exponent_bits) - 1) << fraction_bits;
  return ((rounded & 0x8000) != 0) == std::signbit(value) && (own == 0 || fits(own - 1)) &&
         (own >= infinity || fits(own + 1));
}

TEST_CASE("rounding goes to the nearest number, ties to the even one") {
  std::mt19937 random(11);
  int wrong = 0;
  for (int i = 0; i < 200000; ++i) {
    // Any bits; and numbers half way between two fp16 or two bf16 numbers.
    auto bits = static_cast<std::uint32_t>(random());
    if (i % 3 == 1) {
      bits = (bits & ~0x1fffU) | 0x1000U;
    } else if (i % 3 == 2) {
      bits = (bits & ~0xffffU) | 0x8000U;
    }
    const float value = std::bit_cast<float>(bits);
    if (!std::isfinite(value)) {
      continue;
    }
    wrong += IsNearest(value, FloatToBf16(value), 8, 7) ? 0 : 1;
    const float small = std::ldexp(
        value, -(static_cast<int>(bits >> 23) & 0xff) + 127 - static_cast<int>(random() % 44) + 20);
    wrong += IsNearest(small, FloatToFp16(small), 5, 10) ? 0 : 1;
  }
  CHECK(wrong == 0);
  // By hand: 65504 is the largest fp16; 65520 lies half way to 65536, which does not exist.
  CHECK(FloatToFp16(65519.996F) == 0x7bff);
  CHECK(FloatToFp16(65520.0F) == 0x7c00);
  CHECK(FloatToFp16(0x1p-25F) == 0);
  CHECK(FloatToFp16(0x1.8p-25F) == 1);
}

TEST_CASE("elements of arrays are read and written by dtype") {
  std::uint16_t halves[2] = {0, 0};
  StoreFloat(DType::kBf16, halves, 1, 1.0F);
  CHECK(halves[0] == 0);
  CHECK(halves[1] == 0x3f80);
  StoreFloat(DType::kFp16, halves, 0, -2.0F);
  CHECK(halves[0] == 0xc000);
  CHECK(LoadFloat(DType::kBf16, halves, 1) == 1.0F);
  CHECK(LoadFloat(DType::kFp16, halves, 0) == -2.0F);
  float singles[2] = {0.0F, 0.0F};
  StoreFloat(DType::kFp32, singles, 1, 0.1F);
  CHECK(singles[1] == 0.1F);
  CHECK(LoadFloat(DType::kFp32, singles, 1) == 0.1F);
}

}  // namespace
}  // namespace shardwright
