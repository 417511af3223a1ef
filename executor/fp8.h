#pragma once

// The two 8-bit floating-point formats in software, and the scales of what is rounded to them, as
// torchao's float8 training has both. To nearest, ties to even; what is too large becomes the
// largest number of its sign. The CUDA device compiles the scales from the same text.

#include <bit>
#include <cstdint>

#include "models/kernels/fp8.h"

#if defined(__CUDACC__)
#define SW_FP8 __device__ __forceinline__
#else
#include "executor/half.h"

#define SW_FP8 [[gnu::always_inline]] inline
#endif

namespace shardwright {

struct Fp8Constants {
  float largest;
  float least_normal;
  std::uint32_t dropped_bits;     // of an fp32 number's fraction
  float shift;                    // adding it puts the unit of the last place at the least number
  std::uint32_t exponent_offset;  // between fp32's bias and the format's, in place
  std::uint8_t nan;
};
[[nodiscard]] SW_FP8 constexpr Fp8Constants Fp8ConstantsOf(Fp8Format format) {
  return format == Fp8Format::kE4m3
             ? Fp8Constants{448.0F, 0x1p-6F, 20, 0x1p14F, (127U - 7U) << 23U, 0x7f}
             : Fp8Constants{57344.0F, 0x1p-14F, 21, 0x1p7F, (127U - 15U) << 23U, 0x7e};
}

// What numbers are multiplied with so that the one of the largest magnitude becomes the format's
// largest number; with `by_row` scales are powers of two, so that only the rounding to fp8 is one.
[[nodiscard]] SW_FP8 float Fp8Scale(float largest_magnitude, Fp8Format format, bool by_row) {
  const float largest = Fp8ConstantsOf(format).largest;
  // torchao divides in fp64 by at least 1e-12; the fp32 quotient of two fp32 numbers is the same.
  constexpr double kLeast = 1e-12;
  const float scale = static_cast<double>(largest_magnitude) < kLeast
                          ? static_cast<float>(static_cast<double>(largest) / kLeast)
                          : largest / largest_magnitude;
  if (!by_row) {
    return scale;
  }
  constexpr std::uint32_t kNoFraction = 0xff800000U;
#if defined(__CUDACC__)
  return __uint_as_float(__float_as_uint(scale) & kNoFraction);
#else
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(scale) & kNoFraction);
#endif
}

#if !defined(__CUDACC__)

// The nearest number of the format, without branches. NaN stays NaN.
[[nodiscard]] SW_FP8 float RoundToFp8(float value, const Fp8Constants& format) {
  const auto magnitude = std::bit_cast<std::uint32_t>(value) & 0x7fffffffU;
  const auto size = std::bit_cast<float>(magnitude);
  const std::uint32_t last = 1U << format.dropped_bits;
  const std::uint32_t rounding = last / 2 - 1 + ((magnitude >> format.dropped_bits) & 1U);
  const auto normal = std::bit_cast<float>((magnitude + rounding) & ~(last - 1));
  const float small = (size + format.shift) - format.shift;
  const float nearest = size < format.least_normal ? small : normal;
  const float result = nearest > format.largest ? format.largest : nearest;
  const std::uint32_t sign = std::bit_cast<std::uint32_t>(value) & 0x80000000U;
  const auto signed_result = std::bit_cast<float>(std::bit_cast<std::uint32_t>(result) | sign);
  return value != value ? value : signed_result;
}

[[nodiscard]] inline std::uint8_t FloatToFp8(float value, Fp8Format format) {
  const Fp8Constants constants = Fp8ConstantsOf(format);
  if (value != value) {
    return constants.nan;
  }
  const auto bits = std::bit_cast<std::uint32_t>(RoundToFp8(value, constants));
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  const auto sign = static_cast<std::uint8_t>((bits >> 24U) & 0x80U);
  if (std::bit_cast<float>(magnitude) < constants.least_normal) {
    const float shifted = std::bit_cast<float>(magnitude) + constants.shift;
    return static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) -
                                             std::bit_cast<std::uint32_t>(constants.shift)));
  }
  return static_cast<std::uint8_t>(
      sign | ((magnitude - constants.exponent_offset) >> constants.dropped_bits));
}

[[nodiscard]] inline float Fp8ToFloat(std::uint8_t bits, Fp8Format format) {
  if (format == Fp8Format::kE5m2) {
    return Fp16ToFloat(static_cast<std::uint16_t>(bits << 8U));  // the upper half of a binary16
  }
  const std::uint32_t sign = (bits & 0x80U) << 24U;
  const std::uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7fU) {
    return std::bit_cast<float>(sign | 0x7fc00000U);
  }
  if (magnitude < 8) {
    const float small = static_cast<float>(magnitude) * 0x1p-9F;  // subnormal
    return sign != 0 ? -small : small;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20U) + ((127U - 7U) << 23U)));
}

#endif

}  // namespace shardwright
