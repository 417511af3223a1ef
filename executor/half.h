#pragma once

// The two 16-bit floating-point formats as bits, converted in software: the host has no guaranteed
// instructions for them. Round to nearest, ties to even, as PyTorch and IEEE 754 do.

#include <bit>
#include <cstdint>
#include <cstring>

#include "core/units.h"

namespace shardwright {

// bfloat16 is the upper half of a binary32.
[[nodiscard]] inline float Bf16ToFloat(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

[[nodiscard]] inline std::uint16_t FloatToBf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x40U);  // NaN stays NaN, and becomes quiet
  }
  // Half of the last kept place, minus one when the last kept bit is 0: a tie then rounds down.
  const std::uint32_t rounding = 0x7fffU + ((bits >> 16) & 1U);
  return static_cast<std::uint16_t>((bits + rounding) >> 16);
}

// binary16: 1 sign, 5 exponent (bias 15), 10 fraction bits.
[[nodiscard]] inline float Fp16ToFloat(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000U) << 16;
  const std::uint32_t exponent = (bits >> 10) & 0x1fU;
  const std::uint32_t fraction = bits & 0x3ffU;
  if (exponent == 0x1fU) {
    return std::bit_cast<float>(sign | 0x7f800000U | (fraction << 13));
  }
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;  // subnormal, exact in fp32
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112U) << 23) | (fraction << 13));
}

[[nodiscard]] inline std::uint16_t FloatToFp16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U);
  }
  if (magnitude >= 0x477ff000U) {  // 65520 and more round to infinity
    return static_cast<std::uint16_t>(sign | 0x7c00U);
  }
  if (magnitude < 0x38800000U) {  // below 2^-14: subnormal
    // Adding 0.5 puts the unit of the last place at 2^-24, so that the FPU rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000U));
  }
  const std::uint32_t rounded = magnitude + 0xfffU + ((magnitude >> 13) & 1U);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000U) >> 13));
}

// Element `index` of an array of floating-point elements of type `dtype` (fp32, bf16 or fp16).
[[nodiscard]] inline float LoadFloat(DType dtype, const void* data, std::int64_t index) {
  if (dtype == DType::kFp32) {
    float value = 0;
    std::memcpy(&value, static_cast<const std::byte*>(data) + index * 4, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, static_cast<const std::byte*>(data) + index * 2, sizeof bits);
  return dtype == DType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

inline void StoreFloat(DType dtype, void* data, std::int64_t index, float value) {
  if (dtype == DType::kFp32) {
    std::memcpy(static_cast<std::byte*>(data) + index * 4, &value, sizeof value);
    return;
  }
  const std::uint16_t bits = dtype == DType::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
  std::memcpy(static_cast<std::byte*>(data) + index * 2, &bits, sizeof bits);
}

}  // namespace shardwright
